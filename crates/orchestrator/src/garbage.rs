//! What is stored for captures and templates that are gone: looked for at the start, and whenever somebody asks.
//!
//! ```text
//! captures on disk, each template's present one ┐
//!                                               ├─▶ kept; all else that is called like a capture, or is a layer, goes
//! images of templates, layers of disks          ┘
//! ```
//! Owns nothing. May run at any time: what a sandbox is being made of belongs to a capture that is named here, and the store
//! keeps what its disks are made of. A capture that is being made is named before it has a directory: it is its template's
//! present one, and nothing else is ever made.

use crate::disks::{CaptureName, Needed};
use crate::node::Node;
use crate::stage::{Cause, Failure, timed};
use crate::template;
use crate::view::Collected;
use std::sync::Arc;

const STAGE: &str = "collect";

/// Removes it.
pub(crate) async fn collect(node: &Arc<Node>) -> Result<Collected, Failure> {
    let listed = Arc::clone(node);
    let needed = tokio::task::spawn_blocking(move || needed(&listed))
        .await
        .unwrap_or_else(|error| Err(Failure::new(STAGE, Cause::Unexpected(error.to_string()))))?;
    let snapshots = || node.snapshots.all().iter().map(|it| it.read(|record| record.id.clone())).collect();
    let collected = node.disks.collect(&needed, &snapshots);
    timed(node.settings.deadlines.step, collected).await.0.map_err(|cause| Failure::new(STAGE, cause))
}

/// What may be used or is being made.
fn needed(node: &Node) -> Result<Needed, Failure> {
    let Needed { mut captures, mut images } = Needed::default();
    for template in &node.templates {
        let keys = template::capture_keys(&template.dir).map_err(|source| {
            let context = format!("cannot list the captures of {}", template.dir.display());
            Failure::new(STAGE, Cause::File { context, source })
        })?;
        let named = keys.into_iter().map(|key| CaptureName { template: template.file.id.clone(), key });
        captures.extend(named);
        captures.insert(template.capture_name());
        let sha256 = &template.file.rootfs_sha256;
        images.extend([node.dir.image_layer(sha256), node.dir.image(sha256)]);
    }
    Ok(Needed { captures, images })
}
