use super::boot_ranges;
use super::system::{parse_apk, parse_dpkg, parse_release};
use super::{FileSystem, look};

#[test]
fn a_release_file_is_understood_however_it_is_quoted() {
    let found = parse_release(b"NAME='A'\nID=debian\nVERSION_ID=\"12\"\n# PRETTY_NAME=no\n");
    assert_eq!((&*found.id, &*found.version), ("debian", "12"));
    assert_eq!(found.name, "A 12");
    let found = parse_release(b"PRETTY_NAME=\"Debian \x1b[31mGNU\"\nID=\xff");
    assert_eq!(found.name, "Debian [31mGNU");
    let long = format!("ID={}", "x".repeat(10_000));
    assert_eq!(parse_release(long.as_bytes()).id.len(), 128);
}

#[test]
fn only_installed_packages_count() {
    let list = b"Package: b\nStatus: install ok installed\nVersion: 1:2-3\nDescription: x\n Version: 9\n\n\
        Package: a\nStatus: deinstall ok config-files\nVersion: 1\n\n\
        Package: c\nStatus: install ok installed\nVersion: 7";
    let found = parse_dpkg(list);
    let found: Vec<_> = found.iter().map(|p| (&*p.name, &*p.version)).collect();
    assert_eq!(found, [("b", "1:2-3"), ("c", "7")]);
    let found = parse_apk(b"C:x\nP:musl\nV:1.2.4-r2\nA:x86_64\n\nP:busybox\nV:1.36.1-r5\n");
    let found: Vec<_> = found.iter().map(|p| (&*p.name, &*p.version)).collect();
    assert_eq!(found, [("busybox", "1.36.1-r5"), ("musl", "1.2.4-r2")]);
}

#[test]
fn every_name_of_a_file_system_names_it() {
    for kind in FileSystem::ALL {
        assert_eq!(FileSystem::named(kind.as_str()), Some(kind));
    }
    assert_eq!(FileSystem::named("reiserfs"), None);
}

#[test]
fn a_disk_of_anything_is_looked_at_without_harm() {
    for length in [0usize, 1, 511, 512, 1500, 5000, 70_000] {
        for byte in [0u8, 0x55, 0xff] {
            let disk = vec![byte; length];
            assert_eq!(look(&disk).system, None);
            assert!(boot_ranges(&disk).iter().all(|r| r.end <= length as u64));
        }
    }
}
