//! Finds the sandbox of a signed file URL that names none: the one whose token made the signature.
//!
//! Clients build such URLs from one fixed address when no domain resolves to this node. Whether the signature has expired
//! is for the guest daemon to say; here only its owner is looked for.

use crate::extract::QueryPairs;
use crate::proxy::refusal::Refusal;
use aenv_orchestrator::Route;
use aenv_protocol::envd::signature::{Operation, file_signature};
use http::Method;
use subtle::ConstantTimeEq as _;

/// The route whose token made the signature of `query`.
///
/// # Errors
/// When there is none.
pub(crate) fn find(routes: &[Route], method: &Method, query: Option<&str>) -> Result<Route, Refusal> {
    let query = QueryPairs::of(query.unwrap_or_default());
    let operation = if method == Method::POST { Operation::Write } else { Operation::Read };
    let path = query.raw("path").unwrap_or_default();
    let user = query.raw("username").unwrap_or_default();
    let signature = query.raw("signature").unwrap_or_default();
    let expiration = match query.get("signature_expiration").map(str::parse::<i64>) {
        None => None,
        Some(Ok(seconds)) => Some(seconds),
        Some(Err(_)) => return Err(Refusal::UnknownSignature),
    };
    let made_it = |route: &&Route| {
        route.access_token.as_deref().is_some_and(|token| {
            let expected = file_signature(path, operation, user, token, expiration);
            expected.as_bytes().ct_eq(signature.as_bytes()).into()
        })
    };
    routes.iter().find(made_it).cloned().ok_or(Refusal::UnknownSignature)
}
