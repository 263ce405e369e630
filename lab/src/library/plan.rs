//! What a build will cost, said before it starts.

use std::fs;
use std::path::Path;

use anyhow::{Result, bail};
use comfy_table::Table as Printed;

use super::cache;
use super::manifest::Manifest;
use super::table::{Recipe, Spec, Table};

const MIB: u64 = 1 << 20;

/// What an image is expected to cost. Figures of this library on two cores, rounded up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Bytes from the mirror.
    pub download: u64,
    /// Bytes of the image on disk.
    pub disk: u64,
    /// Bytes of trees while it is built.
    pub work: u64,
    /// Seconds.
    pub seconds: u64,
}

/// The cost of an image in the cache `dir`.
pub fn cost(table: &Table, spec: &Spec, dir: &Path) -> Cost {
    let disk_of_base = |of: &str| {
        let manifest = Manifest::read(&dir.join("images").join(format!("{of}.json")));
        match (manifest, table.find(of)) {
            (Ok(Some(manifest)), _) => manifest.allocated_bytes,
            (_, Some(spec)) => cost(table, spec, dir).disk,
            _ => 0,
        }
    };
    match &spec.recipe {
        Recipe::Debian { suite, set, .. } => {
            let plain = table.sets.get("plain").cloned().unwrap_or_default();
            let beyond = match table.sets.get(set) {
                Some(beyond) if set != "plain" => beyond.clone(),
                _ => super::table::PackageSet::default(),
            };
            let debs = dir.join("packages").join(suite);
            let wanted = beyond
                .packages
                .iter()
                .all(|package| have_deb(&debs, package));
            let disk = (plain.disk + beyond.disk) * MIB;
            Cost {
                download: (if have_deb(&debs, "linux-image-") {
                    0
                } else {
                    plain.download
                } + if wanted { 0 } else { beyond.download })
                    * MIB,
                disk,
                work: disk,
                seconds: plain.seconds + beyond.seconds,
            }
        }
        Recipe::Host(_) => Cost {
            disk: 210 * MIB,
            work: 160 * MIB,
            seconds: 15,
            ..Cost::default()
        },
        Recipe::SameTree(of) => Cost {
            disk: disk_of_base(of) / 10 * 11,
            seconds: 30,
            ..Cost::default()
        },
        Recipe::Aged(of)
            if table
                .find(of)
                .is_some_and(|b| matches!(b.recipe, Recipe::Host(_))) =>
        {
            Cost {
                disk: 220 * MIB,
                work: 180 * MIB,
                seconds: 15,
                ..Cost::default()
            }
        }
        Recipe::Aged(of) => Cost {
            download: 120 * MIB,
            disk: disk_of_base(of) + 800 * MIB,
            work: 0,
            seconds: 150,
        },
        Recipe::Converted(of) => Cost {
            disk: disk_of_base(of),
            seconds: 15,
            ..Cost::default()
        },
    }
}

fn have_deb(debs: &Path, package: &str) -> bool {
    let start = if package.ends_with('-') {
        package.to_owned()
    } else {
        format!("{package}_")
    };
    fs::read_dir(debs).is_ok_and(|mut dir| {
        dir.any(|e| e.is_ok_and(|e| e.file_name().to_string_lossy().starts_with(&start)))
    })
}

/// Prints what some images take, and says what it is in all.
pub fn print(table: &Table, missing: &[&Spec], dir: &Path) -> Cost {
    let mut printed = Printed::new();
    printed.load_style(comfy_table::presets::NOTHING);
    printed.set_header(["to build", "of", "download", "disk", "time"]);
    let mut all = Cost::default();
    for spec in missing {
        let cost = cost(table, spec, dir);
        printed.add_row(row(&spec.name, &spec.describe(), cost));
        all.download += cost.download;
        all.disk += cost.disk;
        all.seconds += cost.seconds;
        all.work = all.work.max(cost.work);
    }
    if missing.len() > 1 {
        printed.add_row(row("all", "", all));
    }
    eprintln!("{printed}");
    all
}

/// Prints what will be built and what it takes, and refuses what cannot fit.
///
/// # Errors
/// When the disk is too small.
pub fn announce(table: &Table, missing: &[&Spec], dir: &Path) -> Result<()> {
    if missing.is_empty() {
        return Ok(());
    }
    let all = print(table, missing, dir);
    let work = cache::work_of(dir);
    let (free, device) = cache::free_bytes(dir)?;
    let (free_for_work, work_device) = cache::free_bytes(&work)?;
    let mut needed = all.disk + all.download;
    let mut places = vec![];
    if device == work_device {
        needed += all.work;
    } else {
        places.push((all.work, free_for_work, work.parent().unwrap_or(&work)));
    }
    places.insert(0, (needed, free, dir));
    for (needed, free, place) in places {
        eprintln!(
            "free in {}: {}, needed: about {}",
            place.display(),
            size(free),
            size(needed)
        );
        if needed > free {
            bail!(
                "{} has {} free, about {} are needed: make room, build fewer (--only), or go elsewhere (--dir, TMPDIR)",
                place.display(),
                size(free),
                size(needed)
            );
        }
    }
    Ok(())
}

fn row(name: &str, of: &str, cost: Cost) -> [String; 5] {
    [
        name.to_owned(),
        of.to_owned(),
        match cost.download {
            0 => "-".to_owned(),
            some => format!("{} MiB", some / MIB),
        },
        format!("{} MiB", cost.disk / MIB),
        match cost.seconds {
            some if some < 120 => format!("{some} s"),
            some => format!("{} min", some.div_ceil(60)),
        },
    ]
}

#[allow(clippy::cast_precision_loss)] // for people
fn size(bytes: u64) -> String {
    if bytes < 10 << 30 {
        return format!("{} MiB", bytes / MIB);
    }
    format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::library::Set;

    #[test]
    fn what_is_kept_is_not_downloaded_again() {
        let dir = tempfile::tempdir().unwrap();
        let table = Table::load(None).unwrap();
        let spec = table.find("bookworm-pg").unwrap();
        let first = cost(&table, spec, dir.path());
        let debs = dir.path().join("packages/bookworm");
        fs::create_dir_all(&debs).unwrap();
        fs::write(debs.join("linux-image-6.1_1_amd64.deb"), b"").unwrap();
        let second = cost(&table, spec, dir.path());
        fs::write(debs.join("postgresql_15_all.deb"), b"").unwrap();
        let third = cost(&table, spec, dir.path());
        assert!(first.download > second.download && second.download > 0);
        assert_eq!(third.download, 0);
        assert_eq!(first.disk, third.disk);
    }

    #[test]
    fn every_image_of_the_table_costs_something() {
        let dir = tempfile::tempdir().unwrap();
        let table = Table::load(None).unwrap();
        for spec in table
            .images(Set::Full)
            .iter()
            .chain(table.images(Set::Small))
        {
            let cost = cost(&table, spec, dir.path());
            assert!(cost.disk > 100 * MIB && cost.seconds > 0, "{}", spec.name);
        }
    }
}
