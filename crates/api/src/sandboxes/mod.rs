//! Routes of sandboxes.

mod create;
mod lifetime;
mod list;
mod metadata;
mod timeout;
mod unsupported;
mod view;

pub(crate) use create::{create_v1, create_v2};
pub(crate) use lifetime::{connect_v1, connect_v2, kill, refresh, resume, set_timeout, show};
pub(crate) use list::{list_v1, list_v2};
