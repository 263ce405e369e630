//! How many snapshots can still be read when machines of a cluster that keeps containers are lost.

use super::fleet::{self, Numbers, Size};
use super::policy::{Policy, Vault};
use crate::bench::{Case, Column, Experiment, Row};

const CONTAINERS: &str = "containers";

pub const EXPERIMENT: Experiment = Experiment {
    name: "availability",
    title: "Snapshots that are left when machines of a cluster fail",
    text: "By the analysis of Zhang et al. (appendix A): each container has three copies on different ones of 100 machines, popular ones have as many as the row says, and a snapshot is lost with any of its containers, which is the case with probability \
C(d, r) / C(100, r) for d lost machines and r copies. How many containers the latest version of a machine uses is what the vault's index makes of it, in the fleet of *Duplicates found* of a terabyte.",
    columns: &[
        Column::label("by", "by"),
        Column::figure(CONTAINERS, "containers a snapshot", 0),
        Column::figure("lost_3", "%, 3 lost", 3),
        Column::figure("lost_5", "%, 5 lost", 3),
        Column::figure("lost_10", "%, 10 lost", 3),
        Column::figure("lost_20", "%, 20 lost", 3),
    ],
    cases: |_| {
        Ok(vec![Case::new(
            "100-machines",
            "a cluster of 100 machines",
            1,
            &[],
        )])
    },
    run: |lab, _| Ok(measure(10, lab.either(Size::USUAL, Size::SMALL))),
};

/// Machines of the cluster.
const CLUSTER: u32 = 100;
const COPIES: u32 = 3;

/// The probability that all copies are on lost machines.
fn lost(lost: u32, copies: u32) -> f64 {
    (0..copies)
        .map(|n| f64::from(lost.saturating_sub(n)) / f64::from(CLUSTER - n))
        .product()
}

fn measure(machines: usize, size: Size) -> Vec<Row> {
    let totals = fleet::count(machines, size);
    let popular = || totals.popular.clone();
    let policies = [
        ("--share all", Vault::new(true, true, Vec::new()), COPIES),
        (
            "--share popular",
            Vault::new(false, true, popular()),
            COPIES,
        ),
        (
            "--share popular, six copies of popular blocks",
            Vault::new(false, true, popular()),
            6,
        ),
        ("--share none", Vault::new(false, true, Vec::new()), COPIES),
    ];
    let row = |(by, mut vault, copies): (&str, Vault, u32)| {
        for number in 0..machines {
            let mut machine = fleet::Machine::new(number, size);
            for day in 0..fleet::VERSIONS {
                if day > 0 {
                    machine.age(day);
                }
                vault.store(&Numbers, &machine.version());
            }
            vault.end(number);
        }
        let used = vault.used();
        let mean = |of: &dyn Fn(&(usize, usize)) -> f64| {
            used.iter().map(of).sum::<f64>() / used.len() as f64
        };
        let mut row = Row::new([("by", by.to_owned())]);
        row.set(CONTAINERS, mean(&|used| (used.0 + used.1) as f64));
        for (key, failed) in [
            ("lost_3", 3),
            ("lost_5", 5),
            ("lost_10", 10),
            ("lost_20", 20),
        ] {
            let left = |used: &(usize, usize)| {
                let popular = (1.0 - lost(failed, copies)).powf(used.0 as f64);
                popular * (1.0 - lost(failed, COPIES)).powf(used.1 as f64)
            };
            row.set(key, 100.0 * mean(&left));
        }
        row
    };
    policies.into_iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_papers_table() {
        // Three lost of 100 with three copies: one in 161,700; of six copies none can be lost.
        assert!((lost(3, 3) - 1.0 / 161_700.0).abs() < 1e-12);
        assert_eq!(lost(5, 6), 0.0);
        let rows = measure(3, Size::SMALL);
        let of = |n: usize, key: &str| rows[n].value(key).unwrap();
        for row in &rows {
            println!("{:50} {:?}", row.label("by"), row.value("lost_10"));
        }
        assert!(of(2, "lost_5") >= of(1, "lost_5"));
        assert!(of(3, "lost_3") > of(3, "lost_20"));
    }
}
