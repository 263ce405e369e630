use proptest::prelude::*;

use super::*;

/// All messages of a stream that arrives in pieces of these lengths, and how it ends.
fn split(bytes: &[u8], pieces: &[usize], limit: usize) -> (Vec<Vec<u8>>, Option<NotAMessage>) {
    let mut splitter = Splitter::new(limit);
    let (mut out, mut rest, mut turn) = (Vec::new(), bytes, 0);
    while !rest.is_empty() {
        let length = pieces
            .get(turn)
            .map_or(rest.len(), |n| (*n).min(rest.len()));
        turn += 1;
        splitter.push(&rest[..length]);
        rest = &rest[length..];
        loop {
            match splitter.next() {
                Ok(Some(message)) => out.push(message),
                Ok(None) => break,
                Err(e) => return (out, Some(e)),
            }
        }
    }
    (out, None)
}

#[test]
fn the_greeting_of_a_real_qemu() {
    let text = r#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "Debian 1:7.2"}, "capabilities": ["oob"]}}"#;
    let Ok(Message::Greeting(greeting)) = parse(text.as_bytes()) else {
        panic!("no greeting");
    };
    assert_eq!(greeting.version.to_string(), "7.2.22");
    assert!(greeting.out_of_band && greeting.package == "Debian 1:7.2");
}

#[test]
fn replies_and_events() {
    let reply = |text: &str| parse(text.as_bytes());
    assert_eq!(
        reply(r#"{"return": {}, "id": 7}"#),
        Ok(Message::Reply {
            id: 7,
            result: Ok(serde_json::json!({}))
        })
    );
    let Ok(Message::Reply {
        id: 8,
        result: Err((class, text)),
    }) = reply(r#"{"id": 8, "error": {"class": "DeviceNotFound", "desc": "no\nsuch thing."}}"#)
    else {
        panic!("no error");
    };
    assert_eq!(
        (class, text.as_str()),
        (ErrorClass::DeviceNotFound, "no such thing")
    );
    let Ok(Message::Event(event)) =
        reply(r#"{"timestamp": {"seconds": 10, "microseconds": 500000}, "event": "STOP"}"#)
    else {
        panic!("no event");
    };
    assert_eq!(event.name, "STOP");
    assert_eq!(
        event.at,
        Some(SystemTime::UNIX_EPOCH + Duration::from_millis(10_500))
    );
    let unknown = reply(r#"{"timestamp": {"seconds": -1, "microseconds": -1}, "event": "STOP"}"#);
    assert!(matches!(
        unknown,
        Ok(Message::Event(Event { at: None, .. }))
    ));
}

#[test]
fn what_has_no_or_two_meanings_is_refused() {
    for text in [
        "{}",
        "{[}",
        "{\"id\": 1}",
        r#"{"return": {}}"#,
        r#"{"return": {}, "id": -1}"#,
        r#"{"return": {}, "id": "1"}"#,
        r#"{"return": {}, "error": {"class": "a", "desc": "b"}, "id": 1}"#,
        r#"{"return": {}, "event": "STOP", "id": 1}"#,
        r#"{"event": 3}"#,
        r#"{"QMP": {"version": 3}}"#,
        r#"{"error": {"class": "GenericError", "desc": "JSON parse error"}}"#,
    ] {
        assert!(parse(text.as_bytes()).is_err(), "{text}");
    }
    let deep = format!(
        r#"{{"return": {}{}, "id": 1}}"#,
        "[".repeat(100_000),
        "]".repeat(100_000)
    );
    assert!(parse(deep.as_bytes()).is_err());
}

#[test]
fn a_stream_is_cut_wherever_it_is_torn() {
    let text = "\r\n{\"a\": \"}\\\"{\"}\r\n{\n  \"b\": {\"c\": [\"\\\\\"]}\n}{} {\"half\"";
    let whole = split(text.as_bytes(), &[], 100);
    let expected: Vec<&[u8]> = vec![
        b"{\"a\": \"}\\\"{\"}",
        b"{\n  \"b\": {\"c\": [\"\\\\\"]}\n}",
        b"{}",
    ];
    assert_eq!(
        whole,
        (expected.iter().map(|one| one.to_vec()).collect(), None)
    );
    assert_eq!(split(text.as_bytes(), &[1; 200], 100), whole);
}

#[test]
fn what_is_endless_or_not_qmp_is_refused_at_once() {
    let (_, error) = split(&[b"{\"a\": \"", [b'x'; 200].as_slice()].concat(), &[], 100);
    assert_eq!(
        error.unwrap().to_string(),
        "a message is longer than 100 bytes"
    );
    let (_, error) = split(b"SSH-2.0-OpenSSH_9.2\r\n", &[3], 100);
    assert_eq!(error.unwrap().to_string(), "it says \"SSH\"");
    let (_, error) = split(b"QEMU 7.2.22 monitor - type 'help'\r\n(qemu) ", &[], 100);
    assert_eq!(
        error.unwrap().to_string(),
        "it is QEMU's monitor for people"
    );
    let blanks = split(&[b' '; 10_000], &[7; 2000], 100);
    assert_eq!(blanks, (vec![], None));
}

proptest! {
    /// Bytes of what JSON is made of: however torn, the messages are the same, and none is longer than allowed.
    #[test]
    fn splitting_does_not_depend_on_the_pieces(
        bytes in proptest::collection::vec(proptest::sample::select(b"{}\"\\[]:, \na1".as_slice()), 0..300),
        pieces in proptest::collection::vec(1usize..20, 0..100),
    ) {
        let text = [b"{".as_slice(), &bytes].concat();
        let (messages, error) = split(&text, &pieces, 64);
        let (whole, whole_error) = split(&text, &[], 64);
        prop_assert_eq!(&messages, &whole);
        prop_assert_eq!(error.is_some(), whole_error.is_some());
        for message in messages {
            prop_assert!(message.len() <= 64);
            let _ = parse(&message);
        }
    }

    #[test]
    fn any_bytes_are_a_message_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse(&bytes);
        let (messages, _) = split(&bytes, &[5, 9], 50);
        prop_assert!(messages.iter().all(|one| one.len() <= 50));
    }
}
