//! System calls that no safe library has: taps, vhost.
//!
//! The functions here are safe to call with any arguments; everything unsafe of net devices is in here.
#![allow(unsafe_code)]

pub mod tap;
pub mod vhost;
