//! Is a request aimed at a sandbox, and at which port? A pure function of the request's head.
//!
//! ```text
//!  host of the form {port}-{id}[-…].{domain} ───────────────▶ that port           (such a host needs a dot)
//!  else E2b-Sandbox-Id and/or E2b-Sandbox-Port present ─────▶ that port           (both must be there)
//!  else GET|HEAD|POST /files?…signature=… ──────────────────▶ the sandbox whose token made the signature
//!  else ────────────────────────────────────────────────────▶ the control plane
//! ```
//! E2B's edge gives headers a meaning only for `localhost`, addresses and `sandbox.*`, because its control plane has a
//! host of its own. Here both share a port, so any host that is not of the sandbox form may carry them.

use crate::extract::QueryPairs;
use aenv_protocol::ids::SandboxId;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};
use percent_encoding::percent_decode_str;

const SANDBOX_ID: HeaderName = HeaderName::from_static("e2b-sandbox-id");
const SANDBOX_PORT: HeaderName = HeaderName::from_static("e2b-sandbox-port");

/// Paths of the guest daemon that only the node may call.
const RESERVED: [&str; 8] =
    ["/init", "/sync", "/freeze", "/unfreeze", "/fsfreeze", "/fsthaw", "/collapse", "/upgrade"];

/// A port of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Which sandbox.
    pub id: SandboxId,
    /// TCP port inside it.
    pub port: u16,
}

/// Where in the sandboxes a request is aimed at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Destination {
    /// A named port of a named sandbox.
    Port(Target),
    /// A file of the sandbox whose token made the signature.
    SignedFile,
    /// A sandbox, but its address makes no sense.
    Invalid(Invalid),
}

/// Why an address of a sandbox makes no sense.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Invalid {
    /// One of the two routing headers is absent.
    MissingHeader,
    /// The sandbox id is not one.
    SandboxId,
    /// The port is not one.
    Port,
    /// A host of the sandbox form without a domain.
    Host,
}

/// Where a request is aimed at; nothing for the control plane.
#[must_use]
pub fn destination(head: &Parts) -> Option<Destination> {
    let host = host(&head.uri, &head.headers);
    if let Some(by_host) = host.as_deref().and_then(by_host) {
        return Some(by_host.map_or_else(Destination::Invalid, Destination::Port));
    }
    if let Some(by_headers) = by_headers(&head.headers) {
        return Some(by_headers.map_or_else(Destination::Invalid, Destination::Port));
    }
    is_signed_file(head).then_some(Destination::SignedFile)
}

/// The host that the client meant, without port, in lower case.
fn host(uri: &Uri, headers: &HeaderMap) -> Option<String> {
    let written = match uri.host() {
        Some(host) => host,
        None => {
            let value = headers.get(http::header::HOST)?.to_str().ok()?;
            match value.strip_prefix('[') {
                Some(address) => address.split(']').next()?,
                None => value.split(':').next()?,
            }
        }
    };
    Some(written.to_ascii_lowercase())
}

/// Nothing when the host is not of the form `{port}-{id}…`.
fn by_host(host: &str) -> Option<Result<Target, Invalid>> {
    let (label, domain) = match host.split_once('.') {
        Some((label, domain)) => (label, Some(domain)),
        None => (host, None),
    };
    let mut parts = label.split('-');
    let port = parts.next().filter(|port| !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit()))?;
    let id = parts.next()?;
    if domain.is_none_or(str::is_empty) {
        return Some(Err(Invalid::Host));
    }
    Some(target(id, port))
}

/// Nothing when neither routing header is there.
fn by_headers(headers: &HeaderMap) -> Option<Result<Target, Invalid>> {
    match (headers.get(SANDBOX_ID), headers.get(SANDBOX_PORT)) {
        (None, None) => None,
        (Some(id), Some(port)) => Some(target(text(id), text(port))),
        _ => Some(Err(Invalid::MissingHeader)),
    }
}

/// What is not visible ASCII becomes empty, which is neither an id nor a port.
fn text(value: &HeaderValue) -> &str {
    value.to_str().unwrap_or_default()
}

fn target(id: &str, port: &str) -> Result<Target, Invalid> {
    let id = id.parse().map_err(|_| Invalid::SandboxId)?;
    if !port.bytes().all(|b| b.is_ascii_digit()) {
        return Err(Invalid::Port);
    }
    match port.parse() {
        Ok(port) if port > 0 => Ok(Target { id, port }),
        _ => Err(Invalid::Port),
    }
}

fn is_signed_file(head: &Parts) -> bool {
    head.uri.path() == "/files"
        && [Method::GET, Method::HEAD, Method::POST].contains(&head.method)
        && head.uri.query().is_some_and(|query| QueryPairs::of(query).get("signature").is_some())
}

/// Whether a path of the guest daemon is for the node alone, however it is spelled.
pub(crate) fn is_reserved(path: &str) -> bool {
    let decoded = percent_decode_str(path).decode_utf8_lossy();
    let mut clean: Vec<&str> = Vec::new();
    for segment in decoded.split('/') {
        match segment {
            "" | "." => {}
            ".." => {
                clean.pop();
            }
            other => clean.push(other),
        }
    }
    RESERVED.contains(&format!("/{}", clean.join("/")).as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;
    use proptest::prelude::*;

    fn of(uri: &str, headers: &[(&str, &str)]) -> Option<Destination> {
        let mut request = Request::get(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        destination(&request.body(()).unwrap().into_parts().0)
    }

    fn port(id: &str, port: u16) -> Option<Destination> {
        Some(Destination::Port(Target { id: id.parse().unwrap(), port }))
    }

    #[test]
    fn hosts() {
        let invalid = |why| Some(Destination::Invalid(why));
        for (host, wanted) in [
            ("localhost:8000", None),
            ("127.0.0.1:8000", None),
            ("[::1]:8000", None),
            ("api.example.org", None),
            ("my-api.example.org", None),
            ("sandbox.example.org", None),
            ("8080.example.org", None),
            ("49983-iabc.example.org", port("iabc", 49983)),
            ("49983-IABC.Example.org:443", port("iabc", 49983)),
            ("80-iabc-client.localhost:8000", port("iabc", 80)),
            ("80-iabc", invalid(Invalid::Host)),
            ("80-iabc.", invalid(Invalid::Host)),
            ("80-.example.org", invalid(Invalid::SandboxId)),
            ("80-i_c.example.org", invalid(Invalid::SandboxId)),
            ("0-iabc.example.org", invalid(Invalid::Port)),
            ("65536-iabc.example.org", invalid(Invalid::Port)),
        ] {
            assert_eq!(of("/", &[("host", host)]), wanted, "{host}");
        }
        assert_eq!(of("http://80-iabc.example.org/x", &[("host", "localhost")]), port("iabc", 80));
    }

    #[test]
    fn routing_headers() {
        let of = |headers: &[(&str, &str)]| of("/", headers);
        let (id, number) = ("e2b-sandbox-id", "e2b-sandbox-port");
        let invalid = |why| Some(Destination::Invalid(why));
        assert_eq!(of(&[(id, "iabc"), (number, "49983")]), port("iabc", 49983));
        assert_eq!(of(&[("host", "gpu-box:8000"), (id, "iabc"), (number, "80")]), port("iabc", 80));
        assert_eq!(of(&[(id, "iabc")]), invalid(Invalid::MissingHeader));
        assert_eq!(of(&[(number, "80")]), invalid(Invalid::MissingHeader));
        assert_eq!(of(&[(id, "iabc-client"), (number, "80")]), invalid(Invalid::SandboxId));
        assert_eq!(of(&[(id, "../x"), (number, "80")]), invalid(Invalid::SandboxId));
        for bad in ["", "x", "+80", "0", "65536", "8 0"] {
            assert_eq!(of(&[(id, "iabc"), (number, bad)]), invalid(Invalid::Port), "{bad:?}");
        }
    }

    #[test]
    fn signed_files_need_no_address() {
        assert_eq!(of("/files?path=a&signature=v1_x", &[]), Some(Destination::SignedFile));
        assert_eq!(of("/files?path=a", &[]), None);
        assert_eq!(of("/sandboxes?signature=v1_x", &[]), None);
    }

    #[test]
    fn reserved_paths_are_found_in_any_spelling() {
        for path in
            ["/init", "//init", "/init/", "/./init", "/x/../init", "/%69nit", "/x%2F..%2Finit", "/../freeze"]
        {
            assert!(is_reserved(path), "{path}");
        }
        for path in ["/", "/health", "/files", "/init/x", "/initial"] {
            assert!(!is_reserved(path), "{path}");
        }
    }

    proptest! {
        #[test]
        fn no_head_panics(host: Vec<u8>, id: Vec<u8>, number: Vec<u8>, path in "/[ -~&&[^#?]]{0,20}", query in "[!-~&&[^#]]{0,20}") {
            let mut request = Request::get("/");
            if let Ok(uri) = format!("{path}?{query}").parse::<Uri>() {
                is_reserved(uri.path());
                request = request.uri(uri);
            }
            for (name, value) in [("host", host), ("e2b-sandbox-id", id), ("e2b-sandbox-port", number)] {
                if let Ok(value) = HeaderValue::from_bytes(&value) {
                    request = request.header(name, value);
                }
            }
            if let Ok(request) = request.body(()) {
                let _ = destination(&request.into_parts().0);
            }
        }

        #[test]
        fn every_host_of_the_sandbox_form_is_read_back(id in "[a-z0-9]{1,30}", number in 1u16.., domain in "[a-z]{1,9}(\\.[a-z]{2,5})?") {
            let host = format!("{number}-{id}.{domain}");
            prop_assert_eq!(of("/", &[("host", &host)]), port(&id, number));
        }
    }
}
