//! The commands, and what is read from `tc`; whether the kernel does what they say is seen in `lab/guest`.

use super::*;

fn shape() -> Shape {
    Options {
        rtt_ms: 40.0,
        rate_mbit: 100.0,
        ..Options::default()
    }
    .shape(Side::A)
}

#[test]
fn a_plain_line_is_a_delay() {
    assert_eq!(
        line(&shape(), Some(1)).join(" "),
        "qdisc add dev wan0 root handle 1: netem limit 357913 delay 20000.000us"
    );
}

#[test]
fn loss_has_its_seed_and_jitter_keeps_the_order_unless_asked() {
    let shape = Shape {
        loss: 0.001,
        jitter_ns: 2_000_000,
        ..shape()
    };
    let ordered = line(&shape, Some(7)).join(" ");
    assert!(ordered.ends_with("delay 20000.000us 2000.000us loss random 0.1% seed 7 rate 100gbit"));
    let unseeded = line(
        &Shape {
            reorder: true,
            ..shape.clone()
        },
        None,
    )
    .join(" ");
    assert!(unseeded.ends_with("delay 20000.000us 2000.000us loss random 0.1%"));
    let most = line(
        &Shape {
            jitter_ns: u64::MAX,
            ..shape
        },
        None,
    )
    .join(" ");
    assert!(most.contains("delay 20000.000us 20000.000us"), "{most}");
}

#[test]
fn the_bottleneck_is_of_full_packets_and_takes_a_piece() {
    assert_eq!(
        bottleneck(&shape(), 6250).unwrap().join(" "),
        "qdisc add dev wan0 parent 1:1 handle 10: tbf rate 100933333bit burst 25000 limit 504666"
    );
    assert_eq!(bottleneck(&Shape { rate: 0, ..shape() }, 65_536), None);
    let fast = bottleneck(
        &Shape {
            rate: 12_500_000,
            ..shape()
        },
        65_536,
    )
    .unwrap();
    let burst: u64 = fast[fast.iter().position(|w| w == "burst").unwrap() + 1]
        .parse()
        .unwrap();
    // 64 KiB in segments of 1448 bytes, with the headers of each.
    assert!(burst > 65_536 + 46 * 66, "{burst}");
}

#[test]
fn what_tc_says_is_what_became_of_the_packets() {
    // As iproute2 6.15 prints it.
    let qdiscs = serde_json::json!([
        {"kind": "netem", "handle": "1:", "root": true, "options": {"limit": 1000},
         "bytes": 15140, "packets": 10, "drops": 5, "overlimits": 0, "qlen": 0},
        {"kind": "tbf", "handle": "10:", "parent": "1:1", "bytes": 15140, "packets": 10, "drops": 3},
        {"kind": "clsact", "handle": "ffff:", "parent": "ffff:fff1", "bytes": 0, "packets": 0, "drops": 0},
    ]);
    let filter = serde_json::json!([
        {"protocol": "all", "pref": 1, "kind": "matchall", "chain": 0},
        {"protocol": "all", "pref": 1, "kind": "matchall", "chain": 0, "options": {"handle": 1, "actions": [
            {"order": 1, "kind": "gact", "stats": {"bytes": 22710, "packets": 15, "drops": 0}}]}},
    ]);
    let cut = serde_json::json!([
        {"total acts": 0},
        {"actions": [{"order": 1, "kind": "gact", "index": 7, "stats": {"bytes": 3000, "packets": 2, "drops": 2}}]},
    ]);
    let counters = counters(&qdiscs, &filter, &cut).unwrap();
    assert_eq!(
        counters,
        Counters {
            packets_in: 15,
            bytes_in: 22_500,
            packets_out: 8,
            bytes_out: 12_000,
            lost: 2,
            overflowed: 3,
            cut: 2,
        }
    );
    let nothing = serde_json::json!([]);
    assert!(super::counters(&nothing, &filter, &cut).is_err());
}
