use drover_core::ImageName;
use drover_store::lease::Access;

use super::options::{COMMIT_LIMIT, GIVE_UP, Options};
use crate::protocol::Request;

#[test]
fn a_commit_has_as_long_as_other_requests_and_longer() {
    let image = ImageName::new("web.raw").unwrap();
    let mut options = Options::new(image, Access::ReadWrite);
    let commit = Request::Commit {
        id: 0,
        epoch: 1,
        covers: 4096,
    };
    let other = Request::Presence {
        id: 0,
        first: 0,
        count: 1,
    };
    for (give_up, limit) in [
        (GIVE_UP, COMMIT_LIMIT),
        (2 * COMMIT_LIMIT, 2 * COMMIT_LIMIT),
    ] {
        options.give_up = give_up;
        assert_eq!(options.limit(&commit), limit);
        assert_eq!(options.limit(&other), give_up);
    }
}
