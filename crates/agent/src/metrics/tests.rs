use super::*;

fn mount(name: &str, state: MountState) -> mounts::Status {
    mounts::Status {
        name: name.into(),
        place: String::new(),
        devices: Vec::new(),
        process: 0,
        since_unix: 0,
        state,
        disks: vec![DiskStatus {
            image: "far:web".into(),
            mode: "managed".into(),
            size: 20,
            local: 10,
            dirty: 5,
            ..DiskStatus::default()
        }],
    }
}

/// Every metric name: dashboards depend on them.
const NAMES: [&str; 72] = [
    "drover_build_info",
    "drover_start_time_seconds",
    "drover_resident_memory_bytes",
    "drover_domain_open",
    "drover_images",
    "drover_transfers_unfinished",
    "drover_peer_taken_bytes",
    "drover_peer_quota_bytes",
    "drover_peers",
    "drover_connections_total",
    "drover_connections_open",
    "drover_connections_rejected_total",
    "drover_pairings_total",
    "drover_tickets_refused_total",
    "drover_sessions_total",
    "drover_sessions_open",
    "drover_wire_bytes_total",
    "drover_images_verified_total",
    "drover_audit_failed_total",
    "drover_migrations_total",
    "drover_migration_bytes_total",
    "drover_migration_rounds_total",
    "drover_migration_pause_seconds_bucket",
    "drover_migration_pause_seconds_count",
    "drover_migration_pause_seconds_sum",
    "drover_replica_age_seconds",
    "drover_replica_size_bytes",
    "drover_replica_rounds_total",
    "drover_served_mounts",
    "drover_served_connections",
    "drover_served_images",
    "drover_served_leases",
    "drover_served_reads_total",
    "drover_served_chunks_total",
    "drover_served_bytes_total",
    "drover_served_link_bytes_total",
    "drover_served_epochs_total",
    "drover_served_leases_broken_total",
    "drover_served_refused_total",
    "drover_served_errors_total",
    "drover_mount_up",
    "drover_mount_size_bytes",
    "drover_mount_local_bytes",
    "drover_mount_dirty_bytes",
    "drover_mount_in_flight_bytes",
    "drover_mount_rate_bytes_per_second",
    "drover_mount_remaining_seconds",
    "drover_mount_link_up",
    "drover_mount_received_bytes_total",
    "drover_mount_sent_bytes_total",
    "drover_mount_epochs",
    "drover_images_delivered_total",
    "drover_blocks_matched_total",
    "drover_blocks_received_total",
    "drover_sequences_pending",
    "drover_matcher_catching_up",
    "drover_matcher_cache_capacity",
    "drover_matcher_cache_entries",
    "drover_matcher_cache_lookups_total",
    "drover_matcher_cache_hits_total",
    "drover_matcher_cache_false_matches_total",
    "drover_matcher_cache_evictions_total",
    "drover_matcher_run_blocks_total",
    "drover_matcher_blocks_total",
    "drover_matcher_heads_total",
    "drover_matcher_blocks_matched_total",
    "drover_matcher_backward_blocks_total",
    "drover_matcher_runs_total",
    "drover_matcher_pages_read_total",
    "drover_matcher_read_bytes_total",
    "drover_matcher_written_bytes_total",
    "drover_matcher_memory_bytes",
];

fn status() -> Status {
    let mut up = mount("a\"b", MountState::Up);
    up.disks[0].seconds_left = Some(2.5);
    let open = DomainStatus {
        name: "default".into(),
        images: 2,
        leases: Some(4),
        replicas: vec![ReplicaInfo {
            name: "web".into(),
            state: "kept".into(),
            peer: "paris".into(),
            moment_ms: Some(1000),
            age_seconds: Some(7),
            every_seconds: None,
            size_bytes: 4096,
            rounds: 3,
            under_way: false,
            images: Vec::new(),
            source: None,
        }],
        site: Some(SiteStatus {
            catching_up: true,
            matcher: vec![("c1_hits".into(), 4), ("via_anchor".into(), 9)],
            ..SiteStatus::default()
        }),
        served: Some(MountCounts {
            writers: 1,
            readers: 2,
            reads_background: 7,
            refused: vec![("leased".into(), 3)],
            failed: vec![("io".into(), 0)],
            ..MountCounts::default()
        }),
        ..DomainStatus::default()
    };
    let closed = DomainStatus {
        name: "acme".into(),
        images: 3,
        peers: vec![Taken {
            peer: "web".into(),
            taken_bytes: 5,
            quota_bytes: Some(10),
        }],
        ..DomainStatus::default()
    };
    Status {
        running: true,
        duty: "site".into(),
        name: "y".into(),
        key: "k".into(),
        home: "/h".into(),
        version: "0.1.0".into(),
        process: 7,
        addresses: Vec::new(),
        started_unix: 5,
        uptime_seconds: 0,
        images: 2,
        peers: 1,
        connections_open: 0,
        sessions_open: 0,
        domains: vec![open, closed],
        mounts: vec![up, mount("dead", MountState::Dead)],
        disks: Vec::new(),
    }
}

#[test]
fn the_names_are_those_that_dashboards_know() {
    let text = Arc::new(Metrics::default()).render(status());
    let mut found: Vec<_> = text
        .lines()
        .filter(|l| !l.starts_with('#'))
        .filter_map(|l| l.split(['{', ' ']).next())
        .collect();
    found.dedup();
    found.sort_unstable();
    let mut names = NAMES;
    names.sort_unstable();
    assert_eq!(found, names);
}

#[test]
fn the_text_is_what_prometheus_reads() {
    let metrics = Arc::new(Metrics::default());
    metrics.connections.store(3, Relaxed);
    metrics.rejected_trust.store(1, Relaxed);
    let text = metrics.render(status());
    for line in [
        "drover_build_info{version=\"0.1.0\"} 1",
        "drover_connections_total 3",
        "drover_connections_rejected_total{reason=\"trust\"} 1",
        "drover_images{domain=\"default\"} 2",
        "drover_images{domain=\"acme\"} 3",
        "drover_domain_open{domain=\"default\"} 1",
        "drover_domain_open{domain=\"acme\"} 0",
        "drover_peer_taken_bytes{domain=\"acme\",peer=\"web\"} 5",
        "drover_peer_quota_bytes{domain=\"acme\",peer=\"web\"} 10",
        "drover_matcher_catching_up{domain=\"default\"} 1",
        "drover_matcher_cache_hits_total{domain=\"default\",cache=\"c1\"} 4",
        "drover_matcher_run_blocks_total{domain=\"default\",via=\"anchor\"} 9",
        "# TYPE drover_sessions counter",
        "drover_served_mounts{domain=\"default\",access=\"read\"} 2",
        "drover_served_reads_total{domain=\"default\",kind=\"background\"} 7",
        "drover_served_refused_total{domain=\"default\",reason=\"leased\"} 3",
        "drover_served_leases{domain=\"default\"} 4",
        "drover_mount_up{mount=\"a\\\"b\"} 1",
        "drover_mount_up{mount=\"dead\"} 0",
        "drover_mount_local_bytes{mount=\"a\\\"b\",image=\"far:web\",mode=\"managed\"} 10",
        "drover_mount_remaining_seconds{mount=\"a\\\"b\",image=\"far:web\",mode=\"managed\"} 2.5",
        "drover_mount_dirty_bytes{mount=\"dead\",image=\"far:web\",mode=\"managed\"} 5",
    ] {
        assert!(text.lines().any(|l| l == line), "{line}\n{text}");
    }
    let has = |start: &str| text.lines().any(|l| l.starts_with(start));
    assert!(
        !has("drover_served_leases{domain=\"acme\""),
        "they cannot be read"
    );
    assert!(
        !has("drover_served_images{domain=\"acme\"")
            && !has("drover_blocks_matched_total{domain=\"acme\""),
        "what is closed counts nothing"
    );
    assert!(
        !has("drover_mount_remaining_seconds{mount=\"dead\""),
        "it is not known"
    );
    assert!(
        !has("drover_mount_local_bytes{mount=\"dead\""),
        "nor is this"
    );
    for line in text.lines().filter(|l| !l.starts_with('#')) {
        let (name, value) = line.rsplit_once(' ').unwrap();
        assert!(
            name.starts_with("drover_") && value.parse::<f64>().is_ok(),
            "{line}"
        );
    }
    let resident = text
        .lines()
        .find_map(|l| l.strip_prefix("drover_resident_memory_bytes "))
        .unwrap();
    assert!(resident.parse::<f64>().unwrap() > 1e6);
}
