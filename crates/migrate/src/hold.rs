//! Wait points for tests.

/// When `DROVER_TEST_HOLD` is `PLACE:PATH`, makes `PATH.held` and waits until there is `PATH`.
pub(crate) async fn hold(place: &str) {
    if !cfg!(debug_assertions) {
        return;
    }
    let Ok(held) = std::env::var("DROVER_TEST_HOLD") else {
        return;
    };
    if let Some(path) = held
        .strip_prefix(place)
        .and_then(|rest| rest.strip_prefix(':'))
    {
        let _ = std::fs::write(format!("{path}.held"), "");
        while !std::path::Path::new(path).exists() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    }
}
