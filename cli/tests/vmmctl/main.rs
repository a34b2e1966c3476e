//! The program `vmmctl` from outside, against a daemon made for the tests.

mod alone;
mod change;
mod choose;
mod console;
mod disks;
mod guest;
mod images;
mod networks;
mod node;
mod observe;
mod port_forward;
mod run;
mod screen;
mod snapshots;
mod support;
mod tls;
mod verbs;
mod wait;
