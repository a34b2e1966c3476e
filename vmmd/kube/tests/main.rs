//! The agent and the controller, as programs, against an API server and vmmds that were made for these tests.

mod agent;
mod controller;
mod faults;
mod kubelet;
mod launcher;
mod migration;
mod mock;
mod plugin;
mod rbac;
mod role;
mod sources;
mod spdy;
mod streams;
