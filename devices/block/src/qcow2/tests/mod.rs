//! Images from end to end, in memory and in files.

mod crash;
mod files;
mod held;
mod lanes;
mod layers;
mod model;
mod refusals;
mod requests;
mod support;
mod uncached;
