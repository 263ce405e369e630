//! A machine that moves among three sites: what it left at one is replaced by whoever brings it there again.

use super::{Moving, Sites, goes_on};
use crate::world::{World, own_address};

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_comes_back_by_another_site() {
    let test = "a_machine_comes_back_by_another_site";
    let homes = ["near", "far", "third"].map(|home| (home, own_address(), &[][..]));
    let Some(sites) = Sites::among(test, World::new(), &homes) else {
        return;
    };
    let mut here = sites.start("near").await;
    here.wait_said("beat", 20).await;
    let way = ["near", "far", "third", "near", "far"];
    for (from, to) in way.iter().zip(&way[1..]) {
        let mut there = sites.wait_for_it(to).await;
        Moving::begin(&sites, from, to, &[]).done();
        here.ended().await;
        goes_on(&here, &mut there).await;
        assert_eq!(
            (sites.state(from), sites.state(to)),
            ("away".into(), "here".into())
        );
        here = there;
    }
}
