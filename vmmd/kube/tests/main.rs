//! The agent and the controller, as programs, against an API server and vmmds that were made for these tests.

mod controller;
mod faults;
mod launcher;
mod migration;
mod mock;
mod plugin;
mod rbac;
mod role;
mod sources;
