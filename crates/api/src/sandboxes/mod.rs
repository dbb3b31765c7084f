//! Routes of sandboxes.

mod create;
mod fork;
mod lifecycle;
mod lifetime;
mod list;
mod metadata;
mod pause;
mod served;
mod timeout;
mod unsupported;
mod view;

pub(crate) use create::{create_v1, create_v2};
pub(crate) use fork::{fork, snapshot};
pub(crate) use lifetime::{kill, refresh, set_timeout, show};
pub(crate) use list::{list_v1, list_v2};
pub(crate) use pause::{connect_v1, connect_v2, pause, resume};
