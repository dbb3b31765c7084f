//! `aenv template …`: what sandboxes can be started from.

use crate::arguments::TemplateCommand;
use crate::commands::Context;
use crate::failure::{Exit, Failure};
use crate::output::human_mebibytes;
use aenv_protocol::rest::{Template, TemplateBuildStatus};

/// Runs a command about templates.
pub(crate) async fn run(context: &Context, command: TemplateCommand) -> Result<Exit, Failure> {
    match command {
        TemplateCommand::Ls => list(context).await,
    }
}

async fn list(context: &Context) -> Result<Exit, Failure> {
    let api = context.api()?;
    let spinner = context.printer.spinner("asking the node");
    let templates = api.templates().await?;
    drop(spinner);
    if context.printer.is_json() {
        context.printer.json(&templates)?;
        return Ok(Exit::DONE);
    }
    if templates.is_empty() {
        context.printer.note("no templates; `make up` builds the template base");
        return Ok(Exit::DONE);
    }
    let header = ["NAME", "ID", "STATUS", "CPU", "MEMORY", "DISK", "STORED", "STANDBYS", "STARTED"];
    context.printer.table(header, templates.iter().map(row).collect())?;
    Ok(Exit::DONE)
}

fn row(template: &Template) -> [String; 9] {
    [
        template.names.first().or(template.aliases.first()).cloned().unwrap_or_default(),
        template.template_id.clone(),
        status(template),
        template.cpu_count.to_string(),
        human_mebibytes(template.memory_mb),
        human_mebibytes(template.disk_size_mb),
        indicatif::BinaryBytes(template.stored_bytes).to_string(),
        template.standbys.to_string(),
        template.spawn_count.to_string(),
    ]
}

fn status(template: &Template) -> String {
    match (template.build_status, &template.failure) {
        (TemplateBuildStatus::Waiting, _) => "waiting".to_owned(),
        (TemplateBuildStatus::Building, _) => "building".to_owned(),
        (TemplateBuildStatus::Ready, _) => "ready".to_owned(),
        (TemplateBuildStatus::Error, None) => "error".to_owned(),
        (TemplateBuildStatus::Error, Some(reason)) => format!("error: {reason}"),
    }
}
