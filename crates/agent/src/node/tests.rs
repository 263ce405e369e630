//! A node's term against a real server.

use std::sync::mpsc::channel;

use drover_store::nodes::Joining;
use drover_store::testing::PostgresServer;

use super::*;

const TERM: Duration = Duration::from_secs(4);

/// Waits for what has to become so, however busy the machine is.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(120), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn the_term_does_not_wait_for_what_is_taken_over() {
    let Some(server) = PostgresServer::start() else {
        return;
    };
    let images = tempfile::tempdir().unwrap();
    let directory = "d".repeat(32);
    fs::write(images.path().join(DIRECTORY_FILE), &directory).unwrap();
    let nodes = Nodes::open(&server.new_database().parse().unwrap()).unwrap();
    let joining = |name: &str| Joining {
        name: name.into(),
        token: name.repeat(32),
        place: name.into(),
        directory: directory.clone(),
        path: images.path().display().to_string(),
        addresses: Vec::new(),
        version: "1".into(),
        term: TERM,
    };
    // A node that is gone: its directory is looked for on a file system that does not answer.
    assert!(nodes.join(&joining("b")).unwrap());
    let (looks, looked) = channel();
    let (answer, answers) = channel::<()>();
    let answers = Mutex::new(answers);
    let asked = clock();
    let joined = joining("a");
    assert!(nodes.join(&joined).unwrap());
    let setting = Setting {
        name: joined.name,
        token: joined.token,
        term: TERM,
        images: images.path().into(),
        directory,
        bases: Box::new(move || {
            let _ = looks.send(());
            let _ = answers.lock().recv();
            Ok(Vec::new())
        }),
        is_idle: Box::new(|_, _| true),
        identity: None,
    };
    let lock = tempfile::tempfile().unwrap();
    let node = Node::start(setting, nodes, lock, asked).unwrap();
    looked.recv_timeout(Duration::from_secs(120)).unwrap();
    // Longer than the term that it has now.
    let waits = clock();
    until("a whole term passes", || clock() > waits + TERM);
    until("it has a term all the same", || node.holds());
    assert!(!node.is_lost());
    drop(answer);
    until("it takes over after all", || {
        let listed = node.nodes().list().unwrap();
        let gone = listed.iter().find(|other| other.name == "b");
        gone.is_some_and(|other| other.row.state == NodeState::Fenced)
    });
    node.leave();
}
