//! Licences, sources and banned crates, from `cargo metadata` and `deny.toml`. Owns no state.
//!
//! It reads the part of cargo-deny's policy file that can be judged without a network, so that cargo-deny, where it is
//! installed, judges by the same file.

use super::Finding;
use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// What `deny.toml` says.
#[derive(Debug, Deserialize)]
pub(super) struct Policy {
    licenses: Licenses,
    bans: Bans,
    sources: Sources,
}

#[derive(Debug, Deserialize)]
struct Licenses {
    allow: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Bans {
    #[serde(default)]
    deny: Vec<Ban>,
}

#[derive(Debug, Deserialize)]
struct Ban {
    #[serde(rename = "crate")]
    name: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Sources {
    allow_registry: Vec<String>,
}

impl Policy {
    /// Reads the text of `deny.toml`.
    pub(super) fn parse(text: &str) -> Result<Self> {
        toml::from_str(text).context("deny.toml is not what this check understands")
    }

    fn accepts(&self, expression: &str) -> Result<bool, String> {
        let parsed = spdx::Expression::parse_mode(expression, spdx::ParseMode::LAX)
            .map_err(|e| e.reason.to_string())?;
        let allowed: BTreeSet<String> = self.licenses.allow.iter().map(|text| text.to_lowercase()).collect();
        Ok(parsed.evaluate(|requirement| allowed.contains(&requirement.to_string().to_lowercase())))
    }
}

/// Judges every package of the full dependency graph.
pub(super) fn check(metadata: &Value, policy: &Policy) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut versions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for package in used_packages(metadata) {
        let text = |field: &str| package[field].as_str();
        let name = text("name").unwrap_or_default();
        let version = text("version").unwrap_or_default();
        let place = format!("{name} {version}");
        versions.entry(name).or_default().insert(version);
        match text("license") {
            None => findings.push(Finding::error(&place, "names no licence")),
            Some(expression) => match policy.accepts(expression) {
                Ok(true) => {}
                Ok(false) => {
                    findings.push(Finding::error(
                        &place,
                        format!("licence {expression} is not among those allowed"),
                    ));
                }
                Err(reason) => {
                    findings.push(Finding::error(
                        &place,
                        format!("licence {expression:?} cannot be read: {reason}"),
                    ));
                }
            },
        }
        if let Some(source) = text("source") {
            let known =
                policy.sources.allow_registry.iter().any(|allowed| source == format!("registry+{allowed}"));
            if !known {
                findings.push(Finding::error(&place, format!("comes from {source}, which is not allowed")));
            }
        }
        if policy.bans.deny.iter().any(|ban| ban.name == name) {
            findings.push(Finding::error(&place, "is banned by deny.toml"));
        }
    }
    for (name, versions) in versions.iter().filter(|(_, versions)| versions.len() > 1) {
        let list = versions.iter().copied().collect::<Vec<_>>().join(", ");
        findings.push(Finding::warning(*name, format!("is built in several versions: {list}")));
    }
    findings
}

/// Packages that are really built for the platform asked for: the nodes of the resolved graph.
fn used_packages(metadata: &Value) -> impl Iterator<Item = &Value> {
    let nodes = metadata["resolve"]["nodes"].as_array().map(Vec::as_slice).unwrap_or_default();
    let used: BTreeSet<&str> = nodes.iter().filter_map(|node| node["id"].as_str()).collect();
    let packages = metadata["packages"].as_array().map(Vec::as_slice).unwrap_or_default();
    packages.iter().filter(move |package| package["id"].as_str().is_some_and(|id| used.contains(id)))
}

#[cfg(test)]
mod tests {
    use super::super::Severity;
    use super::*;
    use serde_json::json;

    const POLICY: &str = r#"
        [licenses]
        allow = ["MIT", "Apache-2.0 WITH LLVM-exception"]
        [bans]
        deny = [{ crate = "openssl" }]
        [sources]
        allow-registry = ["https://registry.example/index"]
    "#;

    fn findings(name: &str, license: Option<&str>, source: Option<&str>) -> Vec<Finding> {
        let package =
            json!({ "id": "1", "name": name, "version": "1.0.0", "license": license, "source": source });
        let graph = json!({ "packages": [package], "resolve": { "nodes": [{ "id": "1" }] } });
        check(&graph, &Policy::parse(POLICY).unwrap())
    }

    #[test]
    fn an_allowed_choice_passes() {
        let source = Some("registry+https://registry.example/index");
        for license in ["MIT", "GPL-3.0 OR MIT", "GPL-3.0/MIT", "Apache-2.0 WITH LLVM-exception"] {
            assert_eq!(findings("a", Some(license), source), [], "{license}");
        }
    }

    #[test]
    fn a_licence_source_or_name_that_is_not_allowed_is_found() {
        assert!(findings("a", Some("GPL-3.0"), None)[0].message.contains("not among"));
        assert!(findings("a", Some("MIT AND GPL-3.0"), None)[0].message.contains("not among"));
        assert!(findings("a", None, None)[0].message.contains("no licence"));
        assert!(
            findings("a", Some("MIT"), Some("git+https://host.example/x"))[0].message.contains("not allowed")
        );
        assert!(findings("openssl", Some("MIT"), None)[0].message.contains("banned"));
    }

    #[test]
    fn two_versions_of_one_crate_are_a_warning() {
        let package =
            |id: &str| json!({ "id": id, "name": "a", "version": id, "license": "MIT", "source": null });
        let nodes = json!([{ "id": "1" }, { "id": "2" }]);
        let graph = json!({ "packages": [package("1"), package("2")], "resolve": { "nodes": nodes } });
        let found = check(&graph, &Policy::parse(POLICY).unwrap());
        assert_eq!(found.iter().map(|finding| finding.severity).collect::<Vec<_>>(), [Severity::Warning]);
    }
}
