//! Pushes.
