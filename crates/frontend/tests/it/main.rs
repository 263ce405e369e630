//! The front ends against those whom they are for: real clients, kernels and programs.

mod fuse;
mod kernel;
mod nbd;
mod region;
mod support;
