//! What a guest is told by `/init`: who it is, what time it is, and what its processes shall find. Pure but for
//! randomness and the clock.

use crate::journal::Tenancy;
use crate::random::{self, NoRandomness};
use aenv_protocol::envd::{Identity, InitRequest};
use aenv_protocol::ids::{SandboxId, TemplateId};

/// User of requests that name none.
const DEFAULT_USER: &str = "user";
/// Name of a guest that is no sandbox yet.
const NOBODY: &str = "standby";

/// For a guest that becomes a sandbox.
pub(crate) fn of_sandbox(
    id: &SandboxId,
    template: &TemplateId,
    tenancy: &Tenancy,
) -> Result<InitRequest, NoRandomness> {
    Ok(InitRequest { identity: Some(identity(id.as_str(), template)?), ..again(tenancy) })
}

/// For a guest that keeps its identity, for example after it was stopped.
pub(crate) fn again(tenancy: &Tenancy) -> InitRequest {
    InitRequest {
        env_vars: tenancy.env_vars.clone(),
        access_token: tenancy.access_token.clone(),
        ..of_nobody()
    }
}

/// For a guest that is to do once, before it is needed, all that the greeting of a sandbox will make it do: an emulating
/// VMM has then translated that code, and the pages it touches are there. The next greeting replaces all of it.
pub(crate) fn rehearsal(template: &TemplateId) -> Result<InitRequest, NoRandomness> {
    Ok(InitRequest { identity: Some(identity(NOBODY, template)?), ..of_nobody() })
}

fn of_nobody() -> InitRequest {
    InitRequest {
        timestamp: Some(jiff::Timestamp::now().to_string()),
        default_user: Some(DEFAULT_USER.to_owned()),
        ..InitRequest::default()
    }
}

fn identity(name: &str, template: &TemplateId) -> Result<Identity, NoRandomness> {
    Ok(Identity {
        sandbox_id: name.to_owned(),
        template_id: template.to_string(),
        hostname: name.to_owned(),
        machine_id: random::machine_id()?,
        entropy: random::entropy()?,
    })
}
