//! Sites that take a standalone teleporter for themselves.

use drover_teleport::services::BeginMatchingFor;

use super::*;

/// Opens a matcher for a domain of the peer's site, or returns why not.
async fn begin(peer: &Client, domain: &str) -> Result<(FrameReader, FrameWriter), Refusal> {
    let domain = domain.to_owned();
    let (mut reader, mut writer) = peer.greeted().await;
    let call = encode_call(&BeginMatchingFor { domain });
    writer.send(kind::CALL, &call).await.unwrap();
    writer.flush().await.unwrap();
    let frame = reader.next().await.unwrap().unwrap();
    match frame.kind {
        kind::REPLY => Ok((reader, writer)),
        _ => Err(decode(&frame.payload).unwrap()),
    }
}

#[test]
fn a_site_leaves_matchers_to_the_others() {
    let world = World::new();
    let teleporter = world.process("matcher", &["teleporter", "--listen", "127.0.0.1:0"]);
    let client = |name: &str| {
        let ticket = world.run("matcher", &["ticket", "--can", "match"]).ok().out;
        let client = Client {
            identity: Identity::generate(),
            ticket: ticket.trim().parse().unwrap(),
        };
        run(client.pair(name, vec![])).unwrap();
        client
    };
    let [greedy, second, third] = ["greedy", "second", "third"].map(client);
    run(async {
        let mut taken = Vec::new();
        let refusal = loop {
            let domain = format!("d{}", taken.len());
            match begin(&greedy, &domain).await {
                Ok(connection) => taken.push(connection),
                Err(refusal) => break refusal,
            }
            assert!(taken.len() < 100);
        };
        assert_eq!(refusal.code, Code::Busy);
        assert!(refusal.message.contains("of your site"), "{refusal}");
        // One that it has open is not another one.
        begin(&greedy, "d0").await.unwrap();
        // An honest site with several domains finds room, and any finds some for one.
        let mut others = Vec::new();
        for domain in ["default", "acme", "globex"] {
            others.push(begin(&second, domain).await.unwrap());
        }
        others.push(begin(&third, "default").await.unwrap());
        let bad = begin(&third, "../../etc").await.unwrap_err();
        assert_eq!(bad.code, Code::Denied);
        // Whoever is forgotten is cut off.
        world
            .run("matcher", &["peers", "forget", "greedy", "--yes"])
            .ok();
        for (reader, _) in &mut taken {
            let end = async { while let Ok(Some(_)) = reader.next().await {} };
            let ended = tokio::time::timeout(Duration::from_secs(10), end).await;
            assert!(ended.is_ok(), "it is matched for on");
        }
        assert_eq!(
            begin(&greedy, "d0").await.unwrap_err().code,
            Code::Untrusted
        );
        drop(taken);
        // The room is the others'.
        for n in 0..8 {
            others.push(begin(&second, &format!("d{n}")).await.unwrap());
        }
    });
    let log = teleporter.log();
    assert!(!log.contains("panicked"), "{log}");
    assert_eq!(teleporter.stop().0, Some(0));
}
