//! What is kept of a flock that was sent, and what it leaves out when it is sent again.

use drover_image::Conversion;
use drover_teleport::FlockImage;

use super::*;

fn peer() -> Peer {
    Peer {
        name: "lyon".into(),
        key: PeerKey([7; 32]),
        addresses: Vec::new(),
        paired_unix: 0,
        grant: Default::default(),
    }
}

fn item(path: &Path, name: &str) -> SendItem {
    SendItem {
        path: path.into(),
        name: ImageName::new(name).unwrap(),
        conversion: Conversion::AsIs,
        snapshot: None,
        profile: None,
    }
}

#[test]
fn what_has_not_changed_here_nor_there_is_left_out() {
    let tmp = tempfile::tempdir().unwrap();
    let home = Home::create(tmp.path().join("home")).unwrap();
    let (peer, name) = (peer(), ImageName::new("shop").unwrap());
    let paths = ["a.img", "b.img", "fresh.img"].map(|name| tmp.path().join(name));
    std::fs::write(&paths[0], vec![1; 8192]).unwrap();
    std::fs::write(&paths[1], vec![1; 8192]).unwrap();
    // The time of a file's last change cannot be set.
    std::thread::sleep(std::time::Duration::from_millis(2100));
    std::fs::write(&paths[2], vec![2; 8192]).unwrap();
    let items: Vec<SendItem> = paths
        .iter()
        .map(|path| item(path, path.file_name().unwrap().to_str().unwrap()))
        .collect();
    let stamped = stamps(&items);
    assert!(stamped[0].is_some() && stamped[1].is_some());
    let digest = |n: u8| Digest([n; 32]);
    let mut record = beginning(&peer, &name, false);
    record.state = FlockState::Delivered;
    record.images = (0..3)
        .map(|i| FlockImage {
            state: ImageState::Delivered,
            digest: digest(i),
            ..FlockImage::waiting(items[i as usize].name.clone())
        })
        .collect();
    let sources = items.iter().zip(&stamped).map(|(item, stamp)| Source {
        path: path_text(&item.path),
        stamp: *stamp,
    });
    let flock = SentFlock {
        record,
        sources: sources.collect(),
    };
    let first = Sending::begin(&home, &peer, &name).unwrap();
    first.record(&flock).unwrap();
    assert_eq!(sent(&home).unwrap(), [(flock.clone(), true)]);
    let e = Sending::begin(&home, &peer, &name).err().unwrap();
    assert!(e.to_string().contains("by another process"), "{e}");
    drop(first);
    assert_eq!(sent(&home).unwrap(), [(flock, false)]);

    let again = Sending::begin(&home, &peer, &name).unwrap();
    let mut has: HashMap<String, Digest> = items
        .iter()
        .enumerate()
        .map(|(i, item)| (item.name.to_string(), digest(i as u8)))
        .collect();
    let left_out = again.unchanged(&items, &stamped, &has);
    assert_eq!(left_out[..2], [Some(digest(0)), Some(digest(1))]);
    // Another form of the same file is another image.
    let mut converted = items.clone();
    converted[0].conversion = Conversion::Opaque;
    let left_out = again.unchanged(&converted, &stamps(&converted), &has);
    assert_eq!(left_out[0], None);
    // Changed here, replaced there.
    std::fs::write(&paths[0], vec![3; 8192]).unwrap();
    has.insert("b.img".into(), digest(9));
    let left_out = again.unchanged(&items, &stamps(&items), &has);
    assert_eq!(left_out[..2], [None, None]);
}

#[test]
fn a_file_that_has_just_changed_is_sent_again() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("a.img");
    std::fs::write(&path, vec![1; 8192]).unwrap();
    let ahead = std::time::SystemTime::now() + std::time::Duration::from_secs(3600);
    let file = File::options().write(true).open(&path).unwrap();
    file.set_modified(ahead).unwrap();
    assert_eq!(stamps(&[item(&path, "a.img")]), [None]);
}

#[test]
fn a_damaged_record_is_as_none() {
    let tmp = tempfile::tempdir().unwrap();
    let home = Home::create(tmp.path().join("home")).unwrap();
    let (peer, name) = (peer(), ImageName::new("shop").unwrap());
    let sending = Sending::begin(&home, &peer, &name).unwrap();
    let record = beginning(&peer, &name, true);
    let sources = Vec::new();
    sending.record(&SentFlock { record, sources }).unwrap();
    let bytes = std::fs::read(&sending.path).unwrap();
    for at in 0..bytes.len() {
        let mut wrong = bytes.clone();
        wrong[at] ^= 1;
        assert_eq!(SentFlock::parse(&wrong), None, "byte {at}");
    }
    std::fs::write(&sending.path, &bytes[..20]).unwrap();
    assert!(sent(&home).unwrap().is_empty());
    drop(sending);
    Sending::begin(&home, &peer, &name).unwrap();
}
