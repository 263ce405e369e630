use super::*;
use crate::experiments::stand_in;

fn total(bytes: u64, seconds: f64) -> Total {
    Total {
        bytes,
        forward: bytes,
        seconds,
        same: true,
    }
}

#[test]
fn what_an_event_costs_is_beyond_the_undisturbed_send() {
    let row = compare(
        Row::default(),
        &total(60_000_000, 8.5),
        &total(40_000_000, 5.0),
    );
    let value = |key: &str| row.value(key).unwrap();
    assert_eq!((value(EXTRA_MB), value(EXTRA_PERCENT)), (20.0, 50.0));
    assert_eq!((value(key::SECONDS), value(EXTRA_SECONDS)), (8.5, 3.5));
    assert_eq!(row.verdict, Verdict::Good);
    let mut wrong = total(1, 1.0);
    wrong.same = false;
    let row = compare(Row::default(), &wrong, &total(1, 1.0));
    assert!(matches!(row.verdict, Verdict::Wrong(_)));
}

/// What ends too soon, or fails, is a row; without an undisturbed send there is nothing to compare with.
#[test]
fn a_send_without_a_half_to_wait_for_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("one.raw");
    std::fs::write(&image, vec![7; 8192]).unwrap();
    let lab = stand_in::lab(dir.path(), "");
    let net = match Net::like(Some(REFERENCE), 1) {
        Ok(net) => net,
        Err(error) => {
            eprintln!("SKIP a_send_without_a_half_to_wait_for_says_so: {error:#}");
            return;
        }
    };
    let (drover, work) = (lab.binary().unwrap(), lab.work("resume").unwrap());
    let ends = Ends {
        drover: &drover,
        net: &net,
        work: &work,
        image: &image,
        deadline: Duration::from_secs(20),
    };
    let undisturbed = ends.send(Event::Nothing, None).unwrap();
    assert!(undisturbed.same);
    let error = ends.send(Event::KillSender, Some(1 << 30)).unwrap_err();
    assert!(error.to_string().contains("ended before"), "{error:#}");
    let total = ends.send(Event::KillSite, Some(0)).unwrap();
    assert!(total.same && total.seconds >= AWAY.as_secs_f64());
}

#[test]
fn both_costs_are_drawn() {
    let row = |what: &str| {
        let row = Row::new([("what", what.to_owned()), ("link", REFERENCE.describe())]);
        compare(row, &total(2, 2.0), &total(1, 1.0))
    };
    let plots = super::plots(&[row("one"), row("two")]);
    let names: Vec<&str> = plots.iter().map(|plot| plot.name.as_str()).collect();
    assert_eq!(names, ["bytes", "seconds"]);
    assert!(super::plots(&[row(Event::Nothing.describe())]).is_empty());
}
