//! Pages of a list that changes while it is read: every item that stays is seen exactly once.
//!
//! Items are ordered by (time, id), which never changes for an item. A token names the last item of a page, so items that
//! come or go in between move nothing. It is bound to the order it was made for; its form is nobody's business:
//!
//! ```text
//! token = base64url( order "_" nanoseconds since the epoch "_" id )      order = asc | desc
//! ```

use crate::error::Failure;
use crate::extract::QueryPairs;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::{HeaderMap, HeaderName, HeaderValue};

/// Carries the token of the next page; absent on the last one.
pub(crate) const X_NEXT_TOKEN: HeaderName = HeaderName::from_static("x-next-token");
/// Largest and usual number of items on a page.
const MAX_ITEMS: usize = 100;

/// Which end of the list comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// Oldest first.
    Ascending,
    /// Newest first.
    Descending,
}

impl Order {
    fn word(self) -> &'static str {
        match self {
            Self::Ascending => "asc",
            Self::Descending => "desc",
        }
    }
}

/// Place of an item in the list: nanoseconds since the epoch, then id.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) nanoseconds: i128,
    pub(crate) id: String,
}

/// Which page is asked for.
#[derive(Debug)]
pub(crate) struct PageRequest {
    pub(crate) order: Order,
    limit: usize,
    after: Option<Key>,
}

impl PageRequest {
    /// Reads `order`, `limit` and `nextToken`.
    ///
    /// # Errors
    /// 400 that names the parameter.
    pub(crate) fn of(query: &QueryPairs) -> Result<Self, Failure> {
        let order = match query.get("order") {
            None | Some("desc") => Order::Descending,
            Some("asc") => Order::Ascending,
            Some(other) => {
                return Err(Failure::field("order", format!("{other:?} is neither `asc` nor `desc`")));
            }
        };
        let limit = query.parsed::<usize>("limit")?.unwrap_or(MAX_ITEMS);
        if !(1..=MAX_ITEMS).contains(&limit) {
            return Err(Failure::field("limit", format!("{limit} is not in 1 to {MAX_ITEMS}")));
        }
        let after = query.get("nextToken").map(|token| decode(token, order)).transpose()?;
        Ok(Self { order, limit, after })
    }

    /// Cuts the page out of all items; the token is there when more follow.
    pub(crate) fn cut<T>(&self, items: Vec<T>, key: impl Fn(&T) -> Key) -> (Vec<T>, Option<String>) {
        let mut keyed: Vec<(Key, T)> = items.into_iter().map(|item| (key(&item), item)).collect();
        keyed.retain(|(key, _)| match (&self.after, self.order) {
            (None, _) => true,
            (Some(after), Order::Ascending) => key > after,
            (Some(after), Order::Descending) => key < after,
        });
        keyed.sort_by(|(a, _), (b, _)| match self.order {
            Order::Ascending => a.cmp(b),
            Order::Descending => b.cmp(a),
        });
        let more = keyed.len() > self.limit;
        keyed.truncate(self.limit);
        let token = keyed.last().filter(|_| more).map(|(key, _)| encode(key, self.order));
        (keyed.into_iter().map(|(_, item)| item).collect(), token)
    }
}

/// Puts the token into the answer's headers.
pub(crate) fn next_token_header(token: Option<&str>) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if let Some(value) = token.and_then(|token| HeaderValue::from_str(token).ok()) {
        headers.insert(X_NEXT_TOKEN, value);
    }
    headers
}

fn encode(key: &Key, order: Order) -> String {
    URL_SAFE_NO_PAD.encode(format!("{}_{}_{}", order.word(), key.nanoseconds, key.id))
}

fn decode(token: &str, order: Order) -> Result<Key, Failure> {
    let invalid = || Failure::field("nextToken", "not a token of this list");
    let text = URL_SAFE_NO_PAD.decode(token).map_err(|_| invalid())?;
    let text = String::from_utf8(text).map_err(|_| invalid())?;
    let mut parts = text.splitn(3, '_');
    let (Some(made_for), Some(nanoseconds), Some(id)) = (parts.next(), parts.next(), parts.next()) else {
        return Err(invalid());
    };
    if made_for != order.word() {
        return Err(Failure::field("nextToken", format!("made for another order than `{}`", order.word())));
    }
    Ok(Key { nanoseconds: nanoseconds.parse().map_err(|_| invalid())?, id: id.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_item_is_seen_exactly_once_whatever_comes_and_goes(
            times in prop::collection::vec(0i128..5, 0..60),
            limit in 1usize..=20,
            ascending: bool,
            newcomers in prop::collection::vec(0i128..5, 0..10),
        ) {
            let mut items: Vec<Key> =
                times.iter().enumerate().map(|(n, t)| Key { nanoseconds: *t, id: format!("i{n}") }).collect();
            let stays = items.clone();
            let order = if ascending { "asc" } else { "desc" };
            let mut seen = Vec::new();
            let mut token: Option<String> = None;
            let mut newcomers = newcomers.into_iter().enumerate();
            loop {
                let query = format!("order={order}&limit={limit}&nextToken={}", token.unwrap_or_default());
                let request = PageRequest::of(&QueryPairs::of(&query)).unwrap();
                let (page, next) = request.cut(items.clone(), Clone::clone);
                prop_assert!(page.len() <= limit);
                seen.extend(page);
                token = next;
                if token.is_none() { break; }
                if let Some((n, t)) = newcomers.next() {
                    items.push(Key { nanoseconds: t, id: format!("n{n}") });
                }
            }
            let mut sorted = seen.clone();
            sorted.sort();
            if !ascending { sorted.reverse(); }
            prop_assert_eq!(&sorted, &seen);
            for item in stays {
                prop_assert_eq!(seen.iter().filter(|s| **s == item).count(), 1);
            }
        }

        #[test]
        fn no_token_panics(token in ".*") {
            let _ = decode(&token, Order::Ascending).is_ok();
        }
    }

    #[test]
    fn a_token_of_the_other_order_and_bad_limits_are_refused() {
        let token = encode(&Key { nanoseconds: 1, id: "i1".into() }, Order::Ascending);
        for query in [
            format!("nextToken={token}"),
            "limit=0".into(),
            "limit=101".into(),
            "limit=x".into(),
            "order=up".into(),
        ] {
            assert!(PageRequest::of(&QueryPairs::of(&query)).is_err(), "{query}");
        }
        assert!(PageRequest::of(&QueryPairs::of(&format!("order=asc&nextToken={token}"))).is_ok());
    }
}
