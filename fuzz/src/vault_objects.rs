//! The objects of a vault: containers, pages and heads of recipes, uses, records, what is encrypted; what peers
//! send about them.

use drover_vault::fuzzing;

pub fn run(data: &[u8]) {
    match data {
        [0, rest @ ..] => fuzzing::container(rest),
        [1, rest @ ..] => fuzzing::page(rest),
        [2, rest @ ..] => fuzzing::recipe_head(rest),
        [3, rest @ ..] => fuzzing::uses(rest),
        [5, rest @ ..] => fuzzing::sealed(rest),
        [6, rest @ ..] => fuzzing::peer(rest),
        [_, rest @ ..] => fuzzing::records(rest),
        [] => {}
    }
}
