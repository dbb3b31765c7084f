//! Finds the sandbox of a signed file URL that names none: the one whose token made the signature.
//!
//! Clients build such URLs from one fixed address when no domain resolves to this node. Whether the signature has expired
//! is for the guest daemon to say; here only its owner is looked for.

use crate::extract::QueryPairs;
use crate::proxy::refusal::Refusal;
use crate::proxy::wake::Signer;
use aenv_protocol::envd::signature::{Operation, file_signature};
use aenv_protocol::ids::SandboxId;
use http::Method;
use subtle::ConstantTimeEq as _;

/// The sandbox whose token made the signature of `query`.
///
/// # Errors
/// When there is none.
pub(crate) fn find(signers: Vec<Signer>, method: &Method, query: Option<&str>) -> Result<SandboxId, Refusal> {
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
    let made_it = |signer: &Signer| -> bool {
        let expected = file_signature(path, operation, user, &signer.access_token, expiration);
        expected.as_bytes().ct_eq(signature.as_bytes()).into()
    };
    signers.into_iter().find(made_it).map(|signer| signer.id).ok_or(Refusal::UnknownSignature)
}
