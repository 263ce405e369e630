//! What a site knows of image files: a peer's likeness of an image, or, with another first byte, the log of a site.

use drover_store::{Likeness, MAX_LIKENESS_BYTES, fuzzing};

pub fn run(data: &[u8]) {
    let Some((&kind, bytes)) = data.split_first() else {
        return;
    };
    if kind != 0 {
        return fuzzing::known_files(bytes);
    }
    let Some(likeness) = Likeness::decode(bytes) else {
        return;
    };
    let again = likeness.encode();
    assert!(again.len() <= MAX_LIKENESS_BYTES);
    assert_eq!(Likeness::decode(&again).as_ref(), Some(&likeness));
    let same = likeness.similarity(&likeness);
    assert!((0.0..=1.0).contains(&same), "{same}");
    let none = likeness.similarity(&Likeness::default());
    assert!((0.0..=1.0).contains(&none), "{none}");
}
