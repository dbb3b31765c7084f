//! `aenv layer gc`: asks the node to remove what it stores and nothing is made of.

use crate::commands::Context;
use crate::failure::{Exit, Failure};
use aenv_protocol::rest::CollectedGarbage;

/// Asks, and shows what was removed.
pub(crate) async fn collect_garbage(context: &Context) -> Result<Exit, Failure> {
    let api = context.api()?;
    let spinner = context.printer.spinner("removing what nothing is made of");
    let collected = api.collect_garbage().await?;
    drop(spinner);
    if context.printer.is_json() {
        context.printer.json(&collected)?;
        return Ok(Exit::DONE);
    }
    if collected.captures == 0 && collected.layers == 0 && collected.directories == 0 {
        context.printer.note("nothing to remove: something is made of all that the node stores");
    }
    context.printer.table(["CAPTURES", "LAYERS", "DIRECTORIES", "BYTES"], vec![row(&collected)])?;
    Ok(Exit::DONE)
}

fn row(collected: &CollectedGarbage) -> [String; 4] {
    [
        collected.captures.to_string(),
        collected.layers.to_string(),
        collected.directories.to_string(),
        indicatif::BinaryBytes(collected.bytes).to_string(),
    ]
}
