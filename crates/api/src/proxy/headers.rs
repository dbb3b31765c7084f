//! Heads of requests and answers on their way through: what belongs to one connection stays behind.

use http::header::{CONNECTION, EXPECT, HOST, TE, TRAILER, TRANSFER_ENCODING, UPGRADE};
use http::{HeaderMap, HeaderName, HeaderValue};
use std::net::SocketAddr;

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
const PROXY_AUTHORIZATION: HeaderName = HeaderName::from_static("proxy-authorization");
const PROXY_AUTHENTICATE: HeaderName = HeaderName::from_static("proxy-authenticate");
const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// The protocol that a message wants to change to, or changed to.
pub(crate) fn upgrade_of(headers: &HeaderMap) -> Option<HeaderValue> {
    let wanted = tokens(headers).any(|token| token.eq_ignore_ascii_case("upgrade"));
    headers.get(UPGRADE).filter(|_| wanted).cloned()
}

/// Removes what is meant for the next hop only; puts the change of protocol back where there is one.
pub(crate) fn strip(headers: &mut HeaderMap, upgrade: Option<HeaderValue>) {
    let named: Vec<HeaderName> = tokens(headers).filter_map(|token| token.parse().ok()).collect();
    for name in named {
        headers.remove(name);
    }
    for name in [
        CONNECTION,
        KEEP_ALIVE,
        PROXY_CONNECTION,
        PROXY_AUTHORIZATION,
        PROXY_AUTHENTICATE,
        TE,
        TRAILER,
        TRANSFER_ENCODING,
        UPGRADE,
    ] {
        headers.remove(name);
    }
    if let Some(protocol) = upgrade {
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, protocol);
    }
}

/// Makes the head of a request ready for the guest: `Host` stays what the client sent.
pub(crate) fn for_guest(headers: &mut HeaderMap, upgrade: Option<HeaderValue>, from: SocketAddr, host: &str) {
    strip(headers, upgrade);
    // Our own server asks the client to continue as soon as the guest's connection takes the body.
    headers.remove(EXPECT);
    let client = from.ip().to_canonical();
    let chain = match headers.get(X_FORWARDED_FOR).and_then(|value| value.to_str().ok()) {
        Some(before) => format!("{before}, {client}"),
        None => client.to_string(),
    };
    if let Ok(chain) = HeaderValue::from_str(&chain) {
        headers.insert(X_FORWARDED_FOR, chain);
    }
    // A proxy in front that ends TLS knows better.
    headers.entry(X_FORWARDED_PROTO).or_insert(HeaderValue::from_static("http"));
    if !headers.contains_key(HOST)
        && let Ok(host) = HeaderValue::from_str(host)
    {
        headers.insert(HOST, host);
    }
    if let Some(host) = headers.get(HOST).cloned() {
        headers.entry(X_FORWARDED_HOST).or_insert(host);
    }
}

/// The words of `Connection`.
fn tokens(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let values = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim).filter(|token| !token.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pair = |(name, value): &(&'static str, &'static str)| {
            (HeaderName::from_static(name), HeaderValue::from_static(value))
        };
        pairs.iter().map(pair).collect()
    }

    #[test]
    fn hop_by_hop_headers_stay_behind() {
        let mut headers = map(&[
            ("connection", "close, X-Private"),
            ("x-private", "1"),
            ("transfer-encoding", "chunked"),
            ("expect", "100-continue"),
            ("host", "a:1"),
            ("x-kept", "1"),
        ]);
        for_guest(&mut headers, None, "[::ffff:10.0.0.1]:5".parse().unwrap(), "localhost:80");
        let left = map(&[
            ("host", "a:1"),
            ("x-kept", "1"),
            ("x-forwarded-for", "10.0.0.1"),
            ("x-forwarded-proto", "http"),
            ("x-forwarded-host", "a:1"),
        ]);
        assert_eq!(headers, left);
    }

    #[test]
    fn an_upgrade_needs_both_headers() {
        assert!(upgrade_of(&map(&[("upgrade", "websocket")])).is_none());
        let headers = map(&[("upgrade", "websocket"), ("connection", "keep-alive, Upgrade")]);
        assert_eq!(upgrade_of(&headers).unwrap(), "websocket");
    }
}
