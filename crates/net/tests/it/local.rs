//! Unix sockets.

use std::os::unix::fs::{MetadataExt, PermissionsExt};

use drover_net::{LocalListener, Role, connect_unix, greet};

#[tokio::test]
async fn a_local_call() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("site.sock");
    let e = connect_unix(&path).await.unwrap_err();
    assert!(
        e.to_string().ends_with("no process is listening there"),
        "{e}"
    );

    let listener = LocalListener::bind(&path).unwrap();
    let meta = std::fs::metadata(&path).unwrap();
    assert_eq!(meta.permissions().mode() & 0o777, 0o600);
    let (there, here) = tokio::join!(listener.accept(), connect_unix(&path));
    let (there, here) = (there.unwrap(), here.unwrap());
    assert_eq!((there.peer(), here.peer()), (None, None));
    assert_eq!(there.local_user(), Some(meta.uid()));
    let wire = there.wire();
    let (mut a_in, mut a_out) = there.split();
    let (mut b_in, mut b_out) = here.split();
    let (a, b) = tokio::join!(
        greet(&mut a_in, &mut a_out, Role::Server),
        greet(&mut b_in, &mut b_out, Role::Client)
    );
    assert_eq!(a.unwrap(), b.unwrap());
    assert!(wire.sent() > 0 && wire.received() == wire.sent());

    drop(listener);
    assert!(!path.exists());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn a_dead_socket_is_replaced_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("site.sock");
    // What a killed process leaves.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let first = LocalListener::bind(&path).unwrap();
    let e = LocalListener::bind(&path).unwrap_err();
    assert!(
        e.to_string().contains("another process is listening"),
        "{e}"
    );
    let (there, here) = tokio::join!(first.accept(), connect_unix(&path));
    there.unwrap();
    here.unwrap();

    let file = dir.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    let e = LocalListener::bind(&file).unwrap_err();
    assert!(e.to_string().contains("not a socket"), "{e}");
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");

    let long = dir.path().join("x".repeat(200));
    let e = LocalListener::bind(&long).unwrap_err();
    assert!(e.to_string().contains("too long"), "{e}");
    let e = connect_unix(&long).await.unwrap_err();
    assert!(e.to_string().contains("too long"), "{e}");
}
