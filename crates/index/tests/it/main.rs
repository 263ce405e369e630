//! The matcher as its callers see it.

mod crash;
mod damage;
mod library;
mod matching;
mod random;
mod reads;
mod trimming;
mod versions;
