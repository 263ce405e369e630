//! Refusals of what a peer has no right to.

use drover_net::{Code, Peer, Refusal, Right, Rights};

/// Fails unless the peer has the right; the refusal says how the site called `site` gives it.
///
/// # Errors
/// [`Code::Denied`].
pub fn must_have(peer: &Peer, right: Right, site: &str) -> Result<(), Refusal> {
    if peer.rights.has(right) {
        return Ok(());
    }
    let text = match right {
        Right::Manage => "only allowed on the site's own host".to_owned(),
        _ if peer.rights.has(Right::Manage) => {
            "only allowed for peers, over the network".to_owned()
        }
        _ => {
            // What can be given, and brings a right that only follows from others.
            let given = match right {
                Right::List => Right::Read,
                Right::Cancel => Right::Send,
                given => given,
            };
            let all = Rights::of(&Vec::from_iter(
                Right::GIVEN
                    .into_iter()
                    .filter(|other| *other == given || peer.rights.has(*other)),
            ));
            format!(
                "your site does not have the right {given} at {site}; its administrator can give it with `drover peers set {name} --can {all}`",
                given = given.name(),
                name = peer.name,
            )
        }
    };
    Err(Refusal::new(Code::Denied, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_says_which_right_and_how_it_is_given() {
        let peer = |rights: Rights| Peer {
            key: drover_net::PeerKey([1; 32]),
            name: "vm".into(),
            rights,
            domain: "default".into(),
        };
        let denied = |rights: Rights, right| must_have(&peer(rights), right, "lyon").unwrap_err();
        let send = Rights::of(&[Right::Send]).of_peer();
        let text = denied(send, Right::Write).message;
        assert!(text.contains("the right write at lyon"), "{text}");
        assert!(
            text.contains("`drover peers set vm --can send,write`"),
            "{text}"
        );
        let text = denied(Rights::NONE.of_peer(), Right::List).message;
        assert!(text.contains("peers set vm --can read`"), "{text}");
        assert!(denied(send, Right::Manage).message.contains("own host"));
        assert!(
            denied(Rights::OWNER, Right::Send)
                .message
                .contains("for peers")
        );
        assert_eq!(must_have(&peer(send), Right::List, "lyon"), Ok(()));
    }
}
