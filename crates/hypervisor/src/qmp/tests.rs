use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::OwnedFd;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};

use super::*;
use crate::error::ErrorClass;

const GREETING: &str = r#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": ""}, "capabilities": ["oob"]}}"#;
const SHORT: Duration = Duration::from_millis(50);

/// The other end, which says what a test wants.
struct Fake {
    lines: BufReader<UnixStream>,
}

impl Fake {
    async fn say(&mut self, text: &str) {
        self.lines.write_all(text.as_bytes()).await.unwrap();
    }

    /// The next command: its name, whether it is in turn, its number.
    async fn asked(&mut self) -> (String, bool, u64) {
        let mut line = String::new();
        self.lines.read_line(&mut line).await.unwrap();
        let value: Value = serde_json::from_str(&line).unwrap();
        let in_turn = value.get("execute").is_some();
        let name = value.get(if in_turn { "execute" } else { "exec-oob" });
        (
            name.unwrap().as_str().unwrap().into(),
            in_turn,
            value["id"].as_u64().unwrap(),
        )
    }

    async fn answer(&mut self, command: &str, returned: &str) {
        let (name, _, id) = self.asked().await;
        assert_eq!(name, command);
        self.say(&format!("{{\"return\": {returned}, \"id\": {id}}}\r\n"))
            .await;
    }
}

/// A connection that has been greeted.
async fn connected() -> (Qmp, Fake) {
    let (here, there) = UnixStream::pair().unwrap();
    let mut fake = Fake {
        lines: BufReader::new(there),
    };
    let greet = async {
        fake.say(GREETING).await;
        fake.answer("qmp_capabilities", "{}").await;
    };
    let (qmp, ()) = tokio::join!(Qmp::over(here, "web.qmp"), greet);
    (qmp.unwrap(), fake)
}

/// What a connection says to a socket that says `text` and, perhaps, closes.
async fn greeted_by(text: &[u8], close: bool) -> String {
    let (here, mut there) = UnixStream::pair().unwrap();
    there.write_all(text).await.unwrap();
    if close {
        there.shutdown().await.unwrap();
    }
    Qmp::over(here, "web.qmp").await.unwrap_err().to_string()
}

#[tokio::test]
async fn another_programs_socket_is_refused_in_one_line() {
    let way_out = "; name the one that QEMU's option -qmp has made";
    for (text, close, reason) in [
        (
            b"HTTP/1.1 400 Bad Request\r\n\r\n".as_slice(),
            false,
            "it says \"HTTP/1.1 400 Bad Request\"",
        ),
        (b"\0\x16\x03", false, "it says \"\u{fffd}\""),
        (
            b"QEMU 7.2.22 monitor - type",
            false,
            "it is QEMU's monitor for people",
        ),
        (
            b"{\"return\": {}, \"id\": 1}",
            false,
            "it does not begin with a greeting",
        ),
        (b"", true, "it closed the connection without a greeting"),
    ] {
        let said = greeted_by(text, close).await;
        if text[0..text.len().min(1)] == [0] {
            assert!(
                said.starts_with("web.qmp is not a QMP socket: it says"),
                "{said}"
            );
        } else {
            assert_eq!(
                said,
                format!("web.qmp is not a QMP socket: {reason}{way_out}")
            );
        }
    }
    let directory = tempfile::tempdir().unwrap();
    let none = Qmp::connect(directory.path().join("none"))
        .await
        .unwrap_err()
        .to_string();
    assert!(none.ends_with("/none: there is no such socket"), "{none}");
    let long = Qmp::connect("x".repeat(200)).await.unwrap_err().to_string();
    assert!(
        long.ends_with("the path is too long for a socket"),
        "{long}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_socket_that_says_nothing_has_a_deadline() {
    let (here, _there) = UnixStream::pair().unwrap();
    let silent = Qmp::over(here, "web.qmp").await.unwrap_err();
    assert!(silent.retryable());
    assert!(
        silent
            .to_string()
            .contains("no QMP greeting within 5s: another program"),
        "{silent}"
    );
}

#[tokio::test]
async fn commands_have_typed_answers_and_errors() {
    let (qmp, mut fake) = connected().await;
    let (number, ()) = tokio::join!(
        qmp.execute::<u64>("query-number", json!({"of": "a\"b"})),
        fake.answer("query-number", "7")
    );
    assert_eq!(number.unwrap(), 7);
    let (wrong, ()) = tokio::join!(
        qmp.execute::<u64>("query-number", json!({})),
        fake.answer("query-number", "{}")
    );
    let wrong = wrong.unwrap_err();
    assert!(
        wrong.undecided()
            && wrong
                .to_string()
                .contains("answered query-number in an unknown way")
    );
    let refuse = async {
        let (_, _, id) = fake.asked().await;
        fake.say(&format!(
            "{{\"id\": {id}, \"error\": {{\"class\": \"CommandNotFound\", \"desc\": \"The command x has not been found\"}}}}\n"
        ))
        .await;
    };
    let (refused, ()) = tokio::join!(qmp.order("x", json!({})), refuse);
    let refused = refused.unwrap_err();
    assert_eq!(refused.class(), Some(&ErrorClass::CommandNotFound));
    assert_eq!(
        refused.to_string(),
        "QEMU at web.qmp refused x: The command x has not been found"
    );
}

#[tokio::test]
async fn answers_find_their_commands_in_any_order_and_events_between() {
    let (qmp, mut fake) = connected().await;
    let mut events = qmp.events();
    let talk = async {
        let (_, _, first) = fake.asked().await;
        let (_, _, second) = fake.asked().await;
        fake.say(&format!(
            "{{\"return\": 2, \"id\": {second}}}{{\"event\": \"STOP\", \"timestamp\": {{\"seconds\": 1, \"microseconds\": 2}}}}\
             {{\"return\": 1, \"id\": {first}}}"
        ))
        .await;
    };
    let (one, two, ()) = tokio::join!(
        qmp.execute::<u8>("one", json!({})),
        qmp.execute::<u8>("two", json!({})),
        talk
    );
    assert_eq!((one.unwrap(), two.unwrap()), (1, 2));
    let seen = events.wait_for("STOP", SHORT, |event| {
        (event.name == "STOP").then_some(event.at)
    });
    assert!(seen.await.unwrap().is_some());
    let none = events
        .wait_for("RESUME", SHORT, |_| Some(()))
        .await
        .unwrap_err();
    assert_eq!(none.to_string(), "QEMU at web.qmp: no RESUME within 50ms");
}

#[tokio::test]
async fn a_qemu_that_hangs_is_said_to_and_still_hears_out_of_band() {
    let (qmp, mut fake) = connected().await;
    for n in 0..=MAX_UNANSWERED {
        // One more than may be unanswered is not even sent.
        let command = Command::new(&format!("hang-{n}")).timeout(SHORT);
        let late = qmp.run::<Value>(command).await.unwrap_err();
        let named = n % MAX_UNANSWERED;
        assert_eq!(
            late.to_string(),
            format!(
                "QEMU at web.qmp has not answered hang-{named} within 50ms: it hangs or is busy"
            )
        );
        assert!(late.undecided() && late.retryable());
    }
    let talk = async {
        let mut ids = Vec::new();
        for n in 0..MAX_UNANSWERED {
            let (name, in_turn, id) = fake.asked().await;
            assert!(in_turn && name == format!("hang-{n}"));
            ids.push(id);
        }
        let (name, in_turn, id) = fake.asked().await;
        assert!(!in_turn && name == "yank");
        fake.say(&format!("{{\"return\": {{}}, \"id\": {id}}}"))
            .await;
        // Now it goes on: late answers are for nobody.
        for id in ids {
            fake.say(&format!("{{\"return\": {{}}, \"id\": {id}}}"))
                .await;
        }
        fake.answer("query-status", "5").await;
    };
    let ask = async {
        qmp.run::<Value>(Command::new("yank").out_of_band())
            .await
            .unwrap();
        assert_eq!(
            qmp.execute::<u8>("query-status", json!({})).await.unwrap(),
            5
        );
    };
    tokio::join!(ask, talk);
}

#[tokio::test]
async fn an_open_file_goes_with_its_command() {
    let (qmp, fake) = connected().await;
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(b"hello").unwrap();
    let command = Command::new("getfd").descriptor(OwnedFd::from(file.try_clone().unwrap()));
    let receive = async {
        let socket = fake.lines.get_ref();
        socket.readable().await.unwrap();
        let mut bytes = [0; 1000];
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = rustix::net::RecvAncillaryBuffer::new(&mut space);
        let mut parts = [std::io::IoSliceMut::new(&mut bytes)];
        let flags = rustix::net::RecvFlags::empty();
        let got = rustix::net::recvmsg(socket, &mut parts, &mut ancillary, flags).unwrap();
        let message: Value = serde_json::from_slice(&bytes[..got.bytes]).unwrap();
        let mut received = ancillary.drain().filter_map(|one| match one {
            rustix::net::RecvAncillaryMessage::ScmRights(files) => Some(files),
            _ => None,
        });
        let descriptor = received.next().unwrap().next().unwrap();
        (message, File::from(descriptor))
    };
    let run = tokio::spawn(async move { qmp.run::<Value>(command.timeout(SHORT)).await });
    let (message, mut received) = receive.await;
    assert_eq!(message["execute"], "getfd");
    let mut text = String::new();
    received.rewind().unwrap();
    received.read_to_string(&mut text).unwrap();
    assert_eq!(text, "hello");
    assert!(run.await.unwrap().is_err());
}

#[tokio::test]
async fn a_connection_that_ends_ends_whoever_waits() {
    let (qmp, mut fake) = connected().await;
    let mut events = qmp.events();
    let die = async move {
        fake.asked().await;
    };
    let (closed, ()) = tokio::join!(qmp.order("quit", json!({})), die);
    let text = "QEMU at web.qmp closed the connection: it has probably ended";
    assert_eq!(closed.unwrap_err().to_string(), text);
    assert_eq!(
        qmp.order("stop", json!({})).await.unwrap_err().to_string(),
        text
    );
    assert_eq!(events.next().await.unwrap_err().to_string(), text);
    assert!(qmp.events().next().await.is_err());
}

#[tokio::test]
async fn a_hostile_qemu_is_cut_off() {
    for (said, reason) in [
        ("nonsense".to_owned(), "it says \"nonsense\""),
        (
            "{\"return\": {}, \"id\": 99}".into(),
            "an answer to no command",
        ),
        (GREETING.into(), "a second greeting"),
        (
            format!("{{\"a\": \"{}", "x".repeat(MAX_MESSAGE)),
            "a message is longer than 4194304 bytes",
        ),
    ] {
        let (qmp, mut fake) = connected().await;
        let talk = async {
            fake.asked().await;
            // It may be cut off before it has said all.
            let _ = fake.lines.write_all(said.as_bytes()).await;
        };
        let (error, ()) = tokio::join!(qmp.order("stop", json!({})), talk);
        let expected = format!("QEMU at web.qmp sent what is not QMP: {reason}");
        assert_eq!(error.unwrap_err().to_string(), expected);
    }
}

#[tokio::test]
async fn a_flood_of_events_costs_the_oldest_ones() {
    let (qmp, mut fake) = connected().await;
    let mut events = qmp.events();
    let event = |name: &str| format!("{{\"event\": \"{name}\", \"data\": {{}}}}\n");
    let talk = async {
        fake.say(&event(&"long".repeat(MAX_EVENT))).await;
        fake.say(&event("FLOOD").repeat(MAX_EVENTS + 44)).await;
        fake.answer("stop", "{}").await;
    };
    let (stopped, ()) = tokio::join!(qmp.order("stop", json!({})), talk);
    stopped.unwrap();
    let lost = events.next().await.unwrap_err();
    assert!(
        lost.retryable() && lost.to_string().contains(": 44 events were lost"),
        "{lost}"
    );
    for _ in 0..MAX_EVENTS {
        assert_eq!(events.next().await.unwrap().name, "FLOOD");
    }
}

#[tokio::test]
async fn what_is_not_read_ends_by_its_timeout() {
    let (qmp, fake) = connected().await;
    let long = Command::new("long").arguments(json!({"text": "x".repeat(900_000)}));
    let late = qmp.run::<Value>(long.timeout(SHORT)).await.unwrap_err();
    assert!(matches!(late, HypervisorError::TimedOut { .. }), "{late}");
    let too_long = Command::new("long").arguments(json!({"text": "x".repeat(MAX_COMMAND)}));
    let refused = qmp.run::<Value>(too_long).await.unwrap_err();
    assert!(
        matches!(refused, HypervisorError::Unsupported { .. }),
        "{refused}"
    );
    // With its last handle the connection goes too.
    drop(qmp);
    let mut rest = Vec::new();
    let mut socket = fake.lines.into_inner();
    let _ = socket.read_to_end(&mut rest).await;
}
