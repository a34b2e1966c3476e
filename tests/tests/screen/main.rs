//! A VM's screen: by vmmctl, by programs that show screens, and with a desktop in the guest.

mod commands;
#[cfg(feature = "nightly")]
mod desktop;
mod glyphs;
mod page;
mod picture;
mod served;
mod shows;
mod viewer;
mod viewers;
mod vmmctl;
