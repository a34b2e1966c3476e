//! Images from end to end, in memory and in files.

mod crash;
mod refusals;
mod requests;
mod support;
