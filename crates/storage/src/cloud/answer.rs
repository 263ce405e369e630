//! What the errors of the library say: whether a retry can help, and what a person reads.

use object_store::Error;
use object_store::path::Path;

/// Most bytes of a store's answer in an error.
const MAX_ANSWER: usize = 300;

/// An answer of the store that is an error: its status, and what follows. The library's type for it is private, and its
/// text is all there is.
pub(super) fn answer(error: &Error) -> Option<(u16, String)> {
    const SAYS: &str = "status code: ";
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = source {
        let text = error.to_string();
        if let Some((_, rest)) = text.split_once(SAYS) {
            let status = rest.get(..3)?.parse().ok()?;
            return Some((status, rest.to_owned()));
        }
        source = error.source();
    }
    None
}

/// Whether the same request may succeed later.
pub(super) fn is_transient(error: &Error) -> bool {
    match error {
        Error::Generic { .. } => answer(error).is_none_or(|(status, text)| {
            status >= 500
                || matches!(status, 408 | 429)
                // S3 waited for the rest of a request, in vain.
                || status == 400 && text.contains("<Code>RequestTimeout</Code>")
        }),
        // A conflict with another write under way is among these.
        Error::AlreadyExists { .. } | Error::JoinError { .. } => true,
        _ => false,
    }
}

/// An error as one short line, without the library's words about retries.
pub(super) fn one_line(error: &Error) -> String {
    let text = match answer(error) {
        Some((_, answer)) => {
            let (status, body) = answer.split_once(':').unwrap_or((&answer, ""));
            let part = |tag: &str| {
                let (_, rest) = body.split_once(&format!("<{tag}>"))?;
                Some(format!(": {}", rest.split_once('<')?.0))
            };
            let (code, message) = (part("Code"), part("Message"));
            format!(
                "{}{}{}",
                status.trim(),
                code.unwrap_or_default(),
                message.unwrap_or_default()
            )
        }
        None => {
            // The innermost says what happened.
            let mut last: &(dyn std::error::Error + 'static) = error;
            while let Some(source) = last.source() {
                last = source;
            }
            last.to_string()
        }
    };
    let line: String = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(MAX_ANSWER)
        .collect();
    match error {
        Error::NotFound { .. } => format!("{line} (does the bucket exist?)"),
        error if is_denied(error) => {
            format!("{line} (see the credentials in the environment, or in ~/.aws/credentials)")
        }
        _ => line,
    }
}

/// Whether the credentials are the reason.
pub(super) fn is_denied(error: &Error) -> bool {
    match error {
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => true,
        // Credentials that have expired.
        _ => answer(error).is_some_and(|(_, text)| text.contains("<Code>ExpiredToken</Code>")),
    }
}

/// The error of a write that was refused, although there is no object.
pub(super) fn conflict(path: &Path) -> Error {
    Error::AlreadyExists {
        path: path.to_string(),
        source: "it conflicts with another write".into(),
    }
}

pub(super) fn failed(why: String) -> Error {
    Error::Generic {
        store: "object store",
        source: why.into(),
    }
}
