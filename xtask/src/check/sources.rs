//! What every Rust file owes: a header that says its job, bounded size, bounded functions, a telling name, and no `unsafe`
//! outside its one home. Owns no state.

use super::Finding;
use proc_macro2::{LineColumn, TokenStream, TokenTree};
use syn::spanned::Spanned;
use syn::visit::Visit;

/// Lines above which a file is asked to be split.
const FILE_LINES_WARN: usize = 500;
/// Lines no file may exceed.
const FILE_LINES_MAX: usize = 800;
/// Lines no function may exceed.
const FUNCTION_LINES_MAX: usize = 80;
/// The one crate with `unsafe`.
const HOME_OF_UNSAFE: &str = "crates/sys/";
/// File and folder names that say nothing.
const EMPTY_NAMES: &[&str] = &["utils", "util", "common", "helpers", "helper", "manager", "service", "misc"];

/// Judges one file.
pub(super) fn check(path: &str, text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    // Tests beside their module are described by the module's own header.
    if !path.ends_with("/tests.rs") && !text.trim_start().starts_with("//!") {
        findings.push(Finding::error(
            path,
            "does not open with `//!`: its job, the state it owns, what it must not do",
        ));
    }
    let lines = text.lines().count();
    if lines > FILE_LINES_MAX {
        findings.push(Finding::error(path, format!("has {lines} lines, more than {FILE_LINES_MAX}")));
    } else if lines > FILE_LINES_WARN {
        findings.push(Finding::warning(path, format!("has {lines} lines, more than {FILE_LINES_WARN}")));
    }
    for part in path.split('/').map(|part| part.trim_end_matches(".rs")) {
        if EMPTY_NAMES.contains(&part) {
            findings.push(Finding::error(path, format!("the name `{part}` does not say what is in it")));
        }
    }
    match syn::parse_file(text) {
        Err(error) => findings.push(Finding::error(path, format!("cannot be parsed: {error}"))),
        Ok(file) => {
            let mut functions = Functions { path, findings: &mut findings };
            functions.visit_file(&file);
        }
    }
    if !path.starts_with(HOME_OF_UNSAFE)
        && let Ok(tokens) = text.parse::<TokenStream>()
        && let Some(place) = find_unsafe(tokens)
    {
        findings.push(Finding::error(
            path,
            format!("line {}: `unsafe` belongs into {HOME_OF_UNSAFE}", place.line),
        ));
    }
    findings
}

/// Where the keyword stands first, macros and attributes included; comments and texts do not count.
fn find_unsafe(tokens: TokenStream) -> Option<LineColumn> {
    tokens.into_iter().find_map(|token| match token {
        TokenTree::Ident(ident) if ident == "unsafe" => Some(ident.span().start()),
        TokenTree::Group(group) => find_unsafe(group.stream()),
        _ => None,
    })
}

struct Functions<'a> {
    path: &'a str,
    findings: &'a mut Vec<Finding>,
}

impl Functions<'_> {
    fn measure(&mut self, signature: &syn::Signature, block: &syn::Block) {
        let lines = block.span().end().line.saturating_sub(signature.span().start().line) + 1;
        if lines > FUNCTION_LINES_MAX {
            let message = format!("fn {} has {lines} lines, more than {FUNCTION_LINES_MAX}", signature.ident);
            self.findings.push(Finding::error(self.path, message));
        }
    }
}

impl<'ast> Visit<'ast> for Functions<'_> {
    fn visit_item_fn(&mut self, function: &'ast syn::ItemFn) {
        self.measure(&function.sig, &function.block);
        syn::visit::visit_item_fn(self, function);
    }

    fn visit_impl_item_fn(&mut self, function: &'ast syn::ImplItemFn) {
        self.measure(&function.sig, &function.block);
        syn::visit::visit_impl_item_fn(self, function);
    }

    fn visit_trait_item_fn(&mut self, function: &'ast syn::TraitItemFn) {
        if let Some(block) = &function.default {
            self.measure(&function.sig, block);
        }
        syn::visit::visit_trait_item_fn(self, function);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Severity;
    use super::*;

    fn messages(path: &str, text: &str) -> Vec<String> {
        check(path, text).into_iter().map(|finding| finding.message).collect()
    }

    #[test]
    fn a_decent_file_passes() {
        let text = "//! Says what it does.\n//! It is not `unsafe`.\nfn f() -> &'static str { \"unsafe\" }\n";
        assert_eq!(check("crates/api/src/a.rs", text), []);
    }

    #[test]
    fn a_missing_header_and_an_empty_name_are_found() {
        assert!(messages("a.rs", "fn f() {}\n")[0].contains("open with"));
        assert_eq!(check("crates/api/src/a/tests.rs", "use super::*;\n"), []);
        assert!(messages("crates/api/src/utils/a.rs", "//! x\n")[0].contains("utils"));
    }

    #[test]
    fn long_files_warn_then_fail() {
        let file = |lines: usize| format!("//! x\n{}", "// y\n".repeat(lines - 1));
        assert_eq!(check("a.rs", &file(500)), []);
        assert_eq!(check("a.rs", &file(501))[0].severity, Severity::Warning);
        assert_eq!(check("a.rs", &file(801))[0].severity, Severity::Error);
    }

    #[test]
    fn long_functions_are_found_wherever_they_stand() {
        let body = "    g();\n".repeat(79);
        let free = format!("//! x\nfn f() {{\n{body}}}\n");
        let method = format!("//! x\nimpl A {{\nfn f() {{\n{body}}}\n}}\n");
        let nested = format!("//! x\nmod m {{ trait T {{\nfn f() {{\n{body}}}\n}} }}\n");
        for text in [free, method, nested] {
            assert!(messages("a.rs", &text)[0].contains("fn f has 81 lines"), "{text}");
        }
    }

    #[test]
    fn unsafe_is_found_outside_its_home_even_in_macros() {
        let block = "//! x\nfn f() { unsafe { g() } }\n";
        let in_macro = "//! x\nmacro_rules! m { () => { unsafe { g() } } }\n";
        let attribute = "//! x\n#[unsafe(no_mangle)]\nfn f() {}\n";
        for text in [block, in_macro, attribute] {
            assert!(messages("crates/vmm/src/a.rs", text)[0].contains("line 2"), "{text}");
            assert_eq!(check("crates/sys/src/a.rs", text), []);
        }
    }
}
