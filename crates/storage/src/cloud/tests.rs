//! What needs no server; the rest is tested by those who use it, against a real one.

use super::*;

/// A write has the more time the longer it is; and only what the answers say is final is final.
#[test]
fn slow_links_and_answers() {
    let base = Duration::from_secs(120);
    assert_eq!(limit_of_write(base, 100), base);
    // A container of 4 MiB at 64 KiB/s takes 64 s.
    assert_eq!(
        limit_of_write(base, 4 << 20),
        base + Duration::from_secs(64)
    );
    let says = |text: &str| Error::Generic {
        store: "S3",
        source: format!("Server returned non-2xx status code: {text}").into(),
    };
    for (text, wanted, denied) in [
        (
            "400 Bad Request: <Error><Code>RequestTimeout</Code></Error>",
            true,
            false,
        ),
        (
            "400 Bad Request: <Error><Code>InvalidRequest</Code></Error>",
            false,
            false,
        ),
        (
            "400 Bad Request: <Error><Code>ExpiredToken</Code></Error>",
            false,
            true,
        ),
        ("503 Slow Down: ", true, false),
        ("429 Too Many Requests: ", true, false),
        ("416 Range Not Satisfiable: ", false, false),
    ] {
        assert_eq!(is_transient(&says(text)), wanted, "{text}");
        assert_eq!(is_denied(&says(text)), denied, "{text}");
    }
}

#[test]
fn urls_of_stores() {
    for bad in ["s3://", "s3:///x", "ftp://x/y", "s3://b/../x", "/srv"] {
        assert!(Cloud::open(bad).is_err(), "{bad}");
    }
}
