//! Which package of the workspace may use which. Owns the table; a new edge is a decision and belongs into it.
//!
//! ```text
//! node ─▶ api ─▶ orchestrator ─▶ {vmm, network, storage} ─▶ sys      snapshot ─▶ storage      cli ─▶ {protocol, storage}      envd ─▶ {protocol, sys}
//! ```

use super::Finding;
use serde_json::Value;

/// Every package of the workspace, and the packages of the workspace it may depend on.
const ALLOWED: &[(&str, &[&str])] = &[
    ("aenv-protocol", &[]),
    ("aenv-sys", &[]),
    ("aenv-storage", &["aenv-sys"]),
    // Snapshots are published from files and read as blobs: docs/decisions/2026-12-01-repository.md
    ("aenv-snapshot", &["aenv-storage"]),
    ("aenv-daemon", &[]),
    ("aenv-export", &["aenv-storage", "aenv-sys"]),
    ("aenv-stored", &["aenv-daemon", "aenv-export", "aenv-storage", "aenv-sys"]),
    ("aenv-network", &["aenv-sys"]),
    ("aenv-vmm", &["aenv-sys"]),
    ("aenv-orchestrator", &["aenv-network", "aenv-protocol", "aenv-storage", "aenv-vmm"]),
    ("aenv-api", &["aenv-orchestrator", "aenv-protocol"]),
    (
        "aenv-node",
        &[
            "aenv-api",
            "aenv-daemon",
            "aenv-network",
            "aenv-orchestrator",
            "aenv-protocol",
            "aenv-storage",
            "aenv-sys",
            "aenv-vmm",
        ],
    ),
    // Layer files are looked at with no node: docs/decisions/2026-11-30-cli-reads-layers.md
    ("aenv", &["aenv-protocol", "aenv-storage"]),
    // PID 1 of a guest needs modules, clock and random pool: docs/decisions/2026-11-30-envd-uses-sys.md
    ("envd", &["aenv-protocol", "aenv-sys"]),
    ("aenv-testkit", &["aenv-network", "aenv-orchestrator", "aenv-protocol", "aenv-storage", "aenv-vmm"]),
    // The baseline of the benchmark drives VMMs and networks without a node.
    ("aenv-e2e", &["aenv-network", "aenv-protocol", "aenv-sys", "aenv-testkit", "aenv-vmm"]),
    ("xtask", &[]),
];

/// Packages that only tests may use, and every test may.
const FOR_TESTS: &[&str] = &["aenv-testkit"];

/// Judges the packages of the workspace as `cargo metadata --no-deps` lists them.
pub(super) fn check(metadata: &Value) -> Vec<Finding> {
    let packages = metadata["packages"].as_array().map(Vec::as_slice).unwrap_or_default();
    let names: Vec<&str> = packages.iter().filter_map(|package| package["name"].as_str()).collect();
    let mut findings = Vec::new();
    for package in packages {
        let name = package["name"].as_str().unwrap_or_default();
        let Some((_, allowed)) = ALLOWED.iter().find(|(known, _)| *known == name) else {
            findings.push(Finding::error(
                name,
                "is not in the table of allowed dependencies (xtask/src/check/edges.rs)",
            ));
            continue;
        };
        for dependency in package["dependencies"].as_array().map(Vec::as_slice).unwrap_or_default() {
            let target = dependency["name"].as_str().unwrap_or_default();
            let in_tests_only = dependency["kind"].as_str() == Some("dev");
            let permitted = allowed.contains(&target) || (in_tests_only && FOR_TESTS.contains(&target));
            if names.contains(&target) && !permitted {
                findings.push(Finding::error(name, format!("must not depend on {target}")));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn package(name: &str, dependency: &str, kind: Option<&str>) -> Value {
        json!({ "name": name, "dependencies": [{ "name": dependency, "kind": kind }] })
    }

    fn findings(name: &str, dependency: &str, kind: Option<&str>) -> Vec<Finding> {
        let target = package(dependency, "serde", None);
        check(&json!({ "packages": [package(name, dependency, kind), target] }))
    }

    #[test]
    fn siblings_and_upward_edges_are_refused() {
        assert_eq!(findings("aenv-vmm", "aenv-network", None).len(), 1);
        assert_eq!(findings("aenv-vmm", "aenv-orchestrator", Some("dev")).len(), 1);
        assert_eq!(findings("aenv-api", "aenv-testkit", None).len(), 1);
        assert_eq!(findings("aenv-api", "aenv-testkit", Some("dev")), []);
        assert_eq!(findings("aenv-vmm", "aenv-sys", None), []);
        assert_eq!(findings("aenv-storage", "aenv-snapshot", None).len(), 1);
        assert_eq!(findings("aenv-snapshot", "aenv-storage", None), []);
    }

    #[test]
    fn a_package_nobody_decided_about_is_found() {
        let found = check(&json!({ "packages": [package("aenv-new", "serde", None)] }));
        assert!(found[0].message.contains("table"), "{found:?}");
    }
}
