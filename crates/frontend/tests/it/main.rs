//! The front ends against real clients, kernels and programs.

mod fuse;
mod kernel;
mod nbd;
mod region;
mod support;
