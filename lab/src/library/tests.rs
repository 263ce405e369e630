//! Tests of the table, the recipes that need no mirror, and cleanup after a killed build.

use std::fs;
use std::process::Command;
use std::time::SystemTime;

use super::cache::Cache;
use super::small::selected;
use super::table::Selection;
use super::*;
use crate::shell;

fn table(dir: &Path, images: &str) -> Result<Table> {
    let file = dir.join("table.toml");
    let text = format!("images = [{images}]\n[sets]\nplain = []\nx = [\"vim\"]\n");
    fs::write(&file, text).unwrap();
    Table::load(Some(&file))
}

#[test]
fn the_table_that_the_lab_came_with_is_sound() {
    let table = Table::load(None).unwrap();
    let full = table.images(Set::Full);
    for (at, spec) in full.iter().enumerate() {
        if let Some(of) = spec.recipe.base() {
            assert!(full[..at].iter().any(|s| s.name == of), "{}", spec.name);
        }
    }
    let qcow2 = table.find("bookworm-db.qcow2").unwrap();
    assert_eq!(
        (qcow2.format(), qcow2.file_name().as_str()),
        ("qcow2", "bookworm-db.qcow2")
    );
    let aged = table.find("bookworm-db-aged").unwrap();
    assert_eq!(table.root(aged).name, "bookworm-db-release");
    let dir = tempfile::tempdir().unwrap();
    let in_order = |set| {
        images(dir.path(), set)
            .unwrap()
            .iter()
            .filter(|e| e.in_order)
            .count()
    };
    assert_eq!((in_order(Set::Full), in_order(Set::Small)), (9, 2));
}

#[test]
fn lines_that_make_no_sense_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let good =
        r#"{ name = "b", ages = "a" }, { name = "a", suite = "trixie", set = "x", fs = "xfs" }"#;
    let good = table(dir.path(), good).unwrap();
    assert_eq!(
        good.images(Set::Full)[0].describe(),
        "Debian trixie, plain + vim, on xfs"
    );
    assert_eq!(good.find("b").unwrap().fs, Fs::Xfs);
    for (line, says) in [
        (r#"{ name = "a" }"#, "needs one of"),
        (r#"{ name = "../a", host = "one" }"#, "lower case"),
        (r#"{ name = "a", suite = "bookworm" }"#, "needs one of"),
        (
            r#"{ name = "a", suite = "bookworm", set = "no" }"#,
            "no package set",
        ),
        (r#"{ name = "a", ages = "b" }"#, "does not have"),
        (r#"{ name = "a", ages = "a" }"#, "does not have"),
        (
            r#"{ name = "a", host = "one" }, { name = "a", host = "two" }"#,
            "twice",
        ),
        (
            r#"{ name = "a", host = "one" }, { name = "b", converts = "a" }"#,
            "must end",
        ),
        (r#"{ name = "a", host = "one", flavour = "x" }"#, "flavour"),
        (
            r#"{ name = "a", host = "one" }, { name = "b.vmdk", converts = "a" }, { name = "c", ages = "b.vmdk" }"#,
            "not raw",
        ),
    ] {
        let said = format!("{:#}", table(dir.path(), line).unwrap_err());
        assert!(said.contains(says), "{line}: {said}");
    }
}

#[test]
fn sources_are_turned_to_another_suite() {
    let stanzas = "Types: deb\n# a comment\nURIs: http://mirror.invalid/debian\nSuites: bookworm bookworm-updates\n\
        Components: main\n\nTypes: deb\nURIs: http://mirror.invalid/security\nSuites: bookworm-security\nComponents: main\n";
    let all = debian::turn(stanzas, "bookworm", "trixie", true);
    assert!(
        all.contains("Suites: trixie trixie-updates\n")
            && all.contains("Suites: trixie-security\n")
    );
    assert!(!all.contains("bookworm") && !all.contains("comment"));
    let plain = debian::turn(stanzas, "bookworm", "bullseye", false);
    assert!(plain.contains("Suites: bullseye\n") && !plain.contains("security"));
    let lines = "# x\ndeb http://mirror.invalid/debian bookworm main\ndeb http://mirror.invalid/security bookworm-security main\n";
    assert_eq!(
        debian::turn(lines, "bookworm", "trixie", false),
        "deb http://mirror.invalid/debian trixie main\n"
    );
    assert_eq!(
        debian::turn(lines, "bookworm", "trixie", true)
            .lines()
            .count(),
        2
    );
}

#[test]
fn files_come_in_the_order_of_installation() {
    let dir = tempfile::tempdir().unwrap();
    let (tree, log) = (dir.path().join("tree"), dir.path().join("log"));
    let info = tree.join("var/lib/dpkg/info");
    fs::create_dir_all(&info).unwrap();
    fs::create_dir_all(tree.join("usr/bin")).unwrap();
    std::os::unix::fs::symlink("usr/bin", tree.join("bin")).unwrap();
    for name in ["a", "b", "c"] {
        fs::write(tree.join("usr/bin").join(name), name).unwrap();
    }
    fs::write(info.join("one:amd64.list"), "/.\n/bin/b\n").unwrap();
    fs::write(info.join("two.list"), "/usr/bin/a\n").unwrap();
    fs::write(
        &log,
        "d t install two:all <none> 1\nd t install one:amd64 <none> 1\n",
    )
    .unwrap();
    let list = |log| String::from_utf8(filesystem::ordered(&tree, log).unwrap()).unwrap();
    let at = |list: &str, name: &str| list.split('\0').position(|p| p == name).unwrap();
    let (with, without) = (list(Some(&log)), list(None));
    assert!(at(&with, "./usr/bin") < at(&with, "./usr/bin/a"));
    assert!(
        at(&with, "./usr/bin/a") < at(&with, "./usr/bin/b")
            && at(&with, "./usr/bin/b") < at(&with, "./usr/bin/c")
    );
    assert!(at(&without, "./usr/bin/b") < at(&without, "./usr/bin/a"));
}

#[test]
fn a_tree_is_on_each_file_system_what_it_was() {
    let test = "a_tree_is_on_each_file_system_what_it_was";
    if !filesystem::is_root() || !Path::new("/dev/loop-control").exists() {
        return eprintln!("SKIP {test}: no root or no loop devices");
    }
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("tree");
    fs::create_dir_all(tree.join("etc")).unwrap();
    fs::write(tree.join("file"), vec![7; 70_000]).unwrap();
    fs::hard_link(tree.join("file"), tree.join("again")).unwrap();
    std::os::unix::fs::symlink("file", tree.join("link")).unwrap();
    for fs in [Fs::Ext4, Fs::Xfs, Fs::Btrfs] {
        let (name, image) = (format!("test-{fs}"), dir.path().join(format!("{fs}.raw")));
        let spec = Spec {
            name,
            recipe: Recipe::Host(Selection::One),
            fs,
        };
        if let Err(error) =
            filesystem::write(&tree, &image, &spec, dir.path(), None, Some("a line"))
        {
            let said = format!("{error:#}");
            assert!(
                said.contains("mount") || said.contains("cannot start"),
                "{said}"
            );
            eprintln!("SKIP {test}, {fs}: {said}");
            continue;
        }
        let mounted = filesystem::Mounted::new(&image, dir.path().join("back"), fs, true).unwrap();
        let read = |file: &str| std::fs::read(mounted.at.join(file)).unwrap();
        let links =
            std::os::unix::fs::MetadataExt::nlink(&mounted.at.join("again").metadata().unwrap());
        assert_eq!(
            (read("link"), read("etc/fstab"), links),
            (vec![7; 70_000], b"a line\n".to_vec(), 2),
            "{fs}"
        );
        mounted.close().unwrap();
    }
}

#[test]
fn a_tree_becomes_a_sound_file_system_with_the_identity_of_its_name() {
    if !shell::have("mke2fs") || !shell::have("e2fsck") {
        return eprintln!(
            "SKIP a_tree_becomes_a_sound_file_system_with_the_identity_of_its_name: no e2fsprogs"
        );
    }
    let dir = tempfile::tempdir().unwrap();
    let (tree, image, back) = (
        dir.path().join("tree"),
        dir.path().join("image"),
        dir.path().join("back"),
    );
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join("file"), vec![7; 70_000]).unwrap();
    filesystem::mke2fs(&tree, &image, "test").unwrap();
    shell::run(Command::new("e2fsck").args(["-f", "-n"]).arg(&image)).unwrap();
    let header = shell::run(Command::new("dumpe2fs").arg("-h").arg(&image)).unwrap();
    let header = String::from_utf8_lossy(&header.stdout).into_owned();
    assert!(
        header.contains(&filesystem::uuid_of("test", "file system")),
        "{header}"
    );
    let dump = format!("dump /file {}", back.display());
    shell::run(Command::new("debugfs").args(["-R", &dump]).arg(&image)).unwrap();
    assert_eq!(fs::read(back).unwrap(), vec![7; 70_000]);
    assert_ne!(
        filesystem::time_of("bookworm-plain"),
        filesystem::time_of("bookworm-app")
    );
}

#[test]
fn selections_share_most_files_and_each_lacks_some() {
    let paths: Vec<PathBuf> = (0..4000)
        .map(|n| format!("/usr/bin/tool{n}").into())
        .collect();
    let count = |test: &dyn Fn(&Path) -> bool| paths.iter().filter(|p| test(p)).count();
    let has = |p: &Path, selection| selected(p, selection).is_some();
    let both = count(&|p| has(p, Selection::One) && has(p, Selection::Two));
    let only_one = count(&|p| has(p, Selection::One) && !has(p, Selection::Two));
    assert!(
        (2800..3200).contains(&both) && (400..600).contains(&only_one),
        "{both} {only_one}"
    );
}

#[test]
fn the_same_tree_ages_to_the_same_tree() {
    let said = [(); 2].map(|()| {
        let dir = tempfile::tempdir().unwrap();
        for n in 0..400 {
            for (place, end) in [
                ("usr/share/doc", "txt"),
                ("etc/default", "conf"),
                ("usr/lib", "so"),
            ] {
                let path = dir.path().join(format!("{place}/file{n}.{end}"));
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, format!("{place} {n}\n")).unwrap();
            }
        }
        aged::churn(dir.path(), SystemTime::UNIX_EPOCH, 0).unwrap()
    });
    assert_eq!(said[0], said[1]);
    assert!(
        !said[0].starts_with("0 ") && !said[0].contains(" 0 "),
        "{}",
        said[0]
    );
    assert_eq!(aged::sql(0).unwrap(), aged::sql(0).unwrap());
    let text = aged::sql(1).unwrap();
    let count = |word: &str| text.lines().filter(|l| l.starts_with(word)).count();
    assert_eq!(
        (count("INSERT"), count("UPDATE"), count("DELETE")),
        (120, 6000, 3000)
    );
}

#[test]
fn what_a_killed_build_left_is_gone_and_an_image_that_changed_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path()).unwrap();
    let image = dir.path().join("images/small-one.raw");
    let (file, half) = (
        fs::File::create(&image).unwrap(),
        image.with_extension("raw.part"),
    );
    file.set_len(5 << 20).unwrap();
    fs::write(&half, b"half").unwrap();
    let work = cache.work.clone();
    fs::create_dir_all(work.join("b/etc")).unwrap();
    let other = Cache::open(dir.path()).err().unwrap();
    assert!(other.to_string().contains("another build"), "{other}");
    drop(cache);
    // A process that another test is starting has the lock, too, until it has become that program.
    let begun = std::time::Instant::now();
    let again = loop {
        match Cache::open(dir.path()) {
            Err(_) if begun.elapsed().as_secs() < 60 => {
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
            opened => break opened.unwrap(),
        }
    };
    drop(again);
    assert!(!work.exists() && !half.exists() && image.exists());
    // Holes hash as zeros.
    let plain = blake3::hash(&vec![0; 5 << 20]).to_hex().to_string();
    assert_eq!(build::digest_of(&image).unwrap(), plain);
    let manifest = Manifest {
        digest: plain,
        ..Manifest::default()
    };
    fs::write(
        dir.path().join("images/small-one.json"),
        serde_json::to_vec(&manifest).unwrap(),
    )
    .unwrap();
    let args = LibraryArgs {
        set: Set::Small,
        dir: dir.path().to_owned(),
        only: vec!["small-one".to_owned()],
        table: None,
        list: false,
        check: true,
    };
    run(&args).unwrap();
    fs::write(&image, b"other").unwrap();
    assert!(run(&args).is_err());
}
