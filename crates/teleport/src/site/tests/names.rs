//! Records that are changed, names that are reserved, links, and a site that was closed.

use super::*;

#[test]
fn an_image_that_is_indexed_again_is_still_its_owners() {
    let home = Home::new();
    let sample = sample("a.raw", 1, 3_000_000);
    home.arrive(&sample, Until::Removal);
    let (site, _) = home.open();
    let record = site.by_name(&sample.opening.offer.name).unwrap();
    let again = site.index_image(&record.path, &mut |_, _| {}).unwrap();
    assert_ne!(again.id, record.id);
    assert_eq!(again.owner, Some(sample.opening.peer));
}

#[test]
fn links_that_a_crash_left_are_removed() {
    let home = Home::new();
    let links = home.open().0.links_dir();
    std::fs::create_dir_all(links.join("7")).unwrap();
    std::fs::write(links.join("7/image.part"), "x").unwrap();
    home.open();
    assert!(!links.exists());
}

#[test]
fn a_name_that_is_reserved_is_nobody_elses() {
    let home = Home::new();
    let (site, _) = home.open();
    let name = ImageName::new("a.raw").unwrap();
    let held = site.reserve_name(&name).unwrap();
    let number = site.active.number();
    let take = || {
        let wait = std::time::Duration::ZERO;
        site.active.take(&name, "a transfer", number, wait)
    };
    assert_eq!(take().err(), Some(crate::active::Taken::ByAnother));
    drop(held);
    let _taken = take().unwrap();
    assert!(site.reserve_name(&name).is_err());
}

/// Another process, or this one, may open the site again.
#[test]
fn nothing_uses_a_site_that_was_closed() {
    let home = Home::new();
    for work in [true, false] {
        let (site, _) = home.open();
        if work {
            site.wake_copier();
            site.matcher_is_behind();
        }
        site.close().unwrap();
        assert_eq!(Arc::strong_count(&site), 1);
        assert!(site.threads.lock().is_empty());
    }
}
