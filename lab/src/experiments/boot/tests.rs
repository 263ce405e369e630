use super::*;
use crate::experiments::Common;

#[test]
fn an_order_is_recorded_before_it_is_used() {
    let at = |way: Way| ALL.iter().position(|w| *w == way).unwrap();
    assert!(at(Way::Managed) < at(Way::Ordered));
    let order = Path::new("/o");
    assert_eq!(
        Way::Managed.options(order)[1],
        Way::Ordered.options(order)[1]
    );
    assert_eq!(Way::Direct.options(order), Vec::<OsString>::new());
}

#[test]
fn mounts_are_counted_where_ext4_counts_them() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk.raw");
    fs::File::create(&disk).unwrap().set_len(8 << 20).unwrap();
    if !shell::have("mkfs.ext4") || !shell::have("debugfs") {
        eprintln!("SKIP mounts: no e2fsprogs");
        return;
    }
    shell::run(Command::new("mkfs.ext4").arg("-qF").arg(&disk)).unwrap();
    assert_eq!(mounts(&disk).unwrap(), 0);
    shell::run(
        Command::new("debugfs")
            .args(["-w", "-R", "set_super_value mnt_count 7"])
            .arg(&disk),
    )
    .unwrap();
    assert_eq!(mounts(&disk).unwrap(), 7);
}

/// Needs root, a release build of drover, and the library's image (`lab library`).
#[test]
#[ignore = "boots a machine without KVM twice, which takes two minutes: \
            cargo build --release -p drover && cargo test -p drover-lab a_guest_boots -- --ignored"]
fn a_guest_boots_from_afar_shuts_down_and_leaves_a_clean_disk() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let out = tempfile::tempdir().unwrap();
    let lab = Lab {
        common: Common {
            drover: root.join("target/release/drover"),
            dir: root.join("lab/cache"),
            out: out.path().to_owned(),
            json: false,
        },
        repeat: 1,
        small: false,
    };
    if let Err(why) = crate::link::available() {
        eprintln!("SKIP boot: {why}");
        return;
    }
    if let Some(why) = lab.image(IMAGE).err().or_else(|| lab.binary().err()) {
        eprintln!("SKIP boot: {why:#}");
        return;
    }
    for row in measure(&lab, &[Way::LocalQemu, Way::Managed]).unwrap() {
        match &row.verdict {
            Verdict::Skipped(why) => eprintln!("SKIP boot: {why}"),
            verdict => assert_eq!(*verdict, Verdict::Good, "{row:?}"),
        }
    }
}
