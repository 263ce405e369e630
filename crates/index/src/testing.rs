//! Doubles for tests: a storage that loses what was not synced, and a plain model of the matcher.
