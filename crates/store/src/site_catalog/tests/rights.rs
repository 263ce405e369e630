//! What peers may do, and the tickets that say so.

use super::*;

fn acme() -> Grant {
    Grant {
        domain: "acme".into(),
        quota_bytes: Some(500 << 30),
        ..Grant::of("send,read".parse().unwrap())
    }
}

pub fn a_ticket_gives_what_it_says_also_to_a_peer_that_is_known(place: &Place) {
    let catalog = place.open();
    let (key, other) = (PeerKey([1; 32]), PeerKey([2; 32]));
    let add = |secret, grant: &Grant, name: &str| {
        let added = catalog.add_ticket(&[secret; 16], grant, name, 1000, DAY);
        added.unwrap();
    };
    let pair = |secret, key| {
        let paired = catalog.pair(&[secret; 16], key, "web", &[], 1001).unwrap();
        assert!(matches!(paired, PairOutcome::Paired(_)), "{paired:?}");
        let peer = catalog.peer_by_key(&key).unwrap().unwrap();
        (peer.name, peer.grant)
    };
    add(1, &acme(), "");
    add(2, &Grant::of("backup".parse().unwrap()), "");
    add(3, &Grant::default(), "vm");
    add(4, &acme(), "vm");
    add(5, &acme(), "vm");
    assert_eq!(pair(1, key), ("web".into(), acme()));
    assert_eq!(
        pair(2, key),
        ("web".into(), Grant::of("backup".parse().unwrap()))
    );
    assert_eq!(pair(3, key), ("vm".into(), Grant::default()));
    // Its own name is not taken, another's is.
    assert_eq!(pair(4, key), ("vm".into(), acme()));
    assert_eq!(pair(5, other), ("vm-2".into(), acme()));
    assert_eq!(catalog.peers().unwrap().len(), 2);
}

pub fn a_used_ticket_does_not_bring_rights_back(place: &Place) {
    let catalog = place.open();
    let key = PeerKey([1; 32]);
    let grant = Grant::default();
    catalog
        .add_ticket(&[1; 16], &grant, "vm", 1000, DAY)
        .unwrap();
    let pair = || catalog.pair(&[1; 16], key, "web", &[], 1001).unwrap();
    assert_eq!(pair(), PairOutcome::Paired("vm".into()));
    let narrow = Grant::of("read".parse().unwrap());
    let set = |name| catalog.change_grant(name, |grant| grant.clone_from(&narrow));
    let set_now = set("vm").unwrap().unwrap();
    assert_eq!(set_now.grant, narrow);
    let renamed = Peer {
        name: "tenant".into(),
        ..set_now
    };
    catalog.put_peer(&renamed).unwrap();
    assert_eq!(pair(), PairOutcome::Paired("tenant".into()));
    let peer = catalog.peer_by_key(&key).unwrap().unwrap();
    assert_eq!(peer.grant, narrow);
    assert_eq!(set("vm").unwrap(), None);
    drop(catalog);
    let peer = place.open().peer("tenant").unwrap().unwrap();
    assert_eq!(peer.grant, narrow);
}

pub fn tickets_are_listed_and_revoked(place: &Place) {
    let catalog = place.open();
    let key = PeerKey([1; 32]);
    for n in 0..40 {
        let at = 1000 - i64::from(n);
        catalog
            .add_ticket(&[n; 16], &acme(), "vm", at, DAY)
            .unwrap();
    }
    catalog.pair(&[7; 16], key, "x", &[], 1001).unwrap();
    let all = catalog.tickets().unwrap();
    assert_eq!(all.len(), 40);
    assert!(all.is_sorted_by_key(|t| t.created_unix));
    let used: Vec<_> = all.iter().filter(|t| t.used_by.is_some()).collect();
    assert_eq!(used.len(), 1);
    let expected = TicketInfo {
        id: used[0].id.clone(),
        created_unix: 1000 - 7,
        expires_unix: 1000 - 7 + 86_400,
        used_by: Some(key),
        name: "vm".into(),
        grant: acme(),
    };
    assert_eq!((used[0], used[0].id.len()), (&expected, 8));
    // 40 identifiers cannot all begin differently.
    let shared = all.iter().map(|t| &t.id[..1]);
    let shared = shared
        .clone()
        .find(|d| shared.clone().filter(|o| o == d).count() > 1);
    let e = catalog.revoke_ticket(shared.unwrap()).unwrap_err();
    assert!(e.to_string().contains("give more digits"), "{e}");
    for no in ["", "not hexadecimal", &"0".repeat(64)] {
        assert_eq!(catalog.revoke_ticket(no).unwrap(), None, "{no:?}");
    }
    let last = all.last().unwrap();
    let revoked = catalog.revoke_ticket(&last.id.to_uppercase()).unwrap();
    assert_eq!(revoked.as_ref(), Some(last));
    assert_eq!(
        catalog.pair(&[0; 16], key, "x", &[], 1001).unwrap(),
        PairOutcome::UnknownTicket
    );
    // The peer of a used ticket stays.
    catalog.revoke_ticket(&expected.id).unwrap().unwrap();
    assert!(catalog.peer("vm").unwrap().is_some());
    assert_eq!(catalog.tickets().unwrap().len(), 38);
}

pub fn what_cannot_be_read_back_is_not_stored(place: &Place) {
    filled(&place.open());
    let catalog = place.open();
    let domain = |domain: &str| Grant {
        domain: domain.into(),
        ..Grant::default()
    };
    for bad in [domain("../default"), domain(""), domain("Acme")] {
        let named = Peer {
            grant: bad.clone(),
            ..peer("lyon", 1)
        };
        let changed = catalog.change_grant("lyon", |grant| grant.clone_from(&bad));
        assert!(changed.is_err(), "{bad:?}");
        assert!(catalog.put_peer(&named).is_err(), "{bad:?}");
        let added = catalog.add_ticket(&[1; 16], &bad, "", 100, DAY);
        assert!(added.is_err(), "{bad:?}");
    }
    for bad in ["dir", "a b", "-x"] {
        let added = catalog.add_ticket(&[1; 16], &acme(), bad, 100, DAY);
        assert!(added.is_err(), "{bad}");
    }
    let vast = |grant: &mut Grant| grant.quota_bytes = Some(u64::MAX);
    catalog.change_grant("lyon", vast).unwrap().unwrap();
    let lyon = catalog.peer("lyon").unwrap().unwrap();
    assert_eq!(lyon.grant.quota_bytes, Some(i64::MAX as u64));
    assert_eq!(catalog.peers().unwrap().len(), 2);
    assert_eq!(catalog.tickets().unwrap().len(), 1);
    assert_eq!(catalog.images().unwrap().len(), 5);
}
