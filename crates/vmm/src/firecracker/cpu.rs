//! What a guest sees of the CPU, and the name under which captures are bound to it.
//!
//! Must not change anything. Without a template the guest sees the host's CPU, so the host's CPU is the name.

use super::requests::Template;
use sha2::{Digest as _, Sha256};
use std::convert::Infallible;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;

/// What the guest's CPU is to look like.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum CpuTemplate {
    /// Like the host's: captures fit only hosts with the same CPU.
    #[default]
    Host,
    /// One of Firecracker's own templates, by name (`T2`, `T2S`, `T2CL`, `T2A`, `C3`).
    Named(String),
    /// A file in the format of Firecracker's custom templates.
    File(PathBuf),
}

impl FromStr for CpuTemplate {
    type Err = Infallible;

    /// Empty or `none` is the host's CPU, anything with a slash or a dot a file, all else a name.
    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text {
            "" | "none" | "None" => Self::Host,
            file if file.contains(['/', '.']) => Self::File(PathBuf::from(file)),
            name => Self::Named(name.to_owned()),
        })
    }
}

impl fmt::Display for CpuTemplate {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => formatter.write_str("as the host's"),
            Self::Named(name) => write!(formatter, "template {name}"),
            Self::File(path) => write!(formatter, "template {}", path.display()),
        }
    }
}

/// Reads what is needed for a boot, and the name of the CPU model.
pub(super) fn resolve(template: &CpuTemplate) -> io::Result<(Template, String)> {
    match template {
        CpuTemplate::Host => {
            let cpuinfo = std::fs::read_to_string("/proc/cpuinfo")?;
            let unknown =
                || io::Error::new(io::ErrorKind::InvalidData, "/proc/cpuinfo does not name the CPU");
            Ok((Template::None, host_model(&cpuinfo).ok_or_else(unknown)?))
        }
        CpuTemplate::Named(name) => Ok((Template::Static(name.clone()), format!("template-{name}"))),
        CpuTemplate::File(path) => {
            let text = std::fs::read(path)?;
            let document = serde_json::from_slice(&text)?;
            let hash = hex::encode(Sha256::digest(&text));
            Ok((Template::Custom(document), format!("template-sha256-{hash}")))
        }
    }
}

/// Vendor, family, model and stepping of the first CPU.
fn host_model(cpuinfo: &str) -> Option<String> {
    let field = |name: &str| {
        let line =
            cpuinfo.lines().find(|line| line.split(':').next().is_some_and(|key| key.trim() == name))?;
        Some(line.split_once(':')?.1.trim())
    };
    let (vendor, family) = (field("vendor_id")?, field("cpu family")?);
    Some(format!("{vendor}-{family}-{}-{}", field("model")?, field("stepping")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_s_cpu_is_named_by_what_tells_models_apart() {
        let cpuinfo = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 15\nmodel\t\t: 107\nmodel name\t: QEMU\nstepping\t: 1\n";
        assert_eq!(host_model(cpuinfo).unwrap(), "AuthenticAMD-15-107-1");
        assert_eq!(host_model("processor\t: 0\n"), None);
    }

    #[test]
    fn templates_are_read_and_named_by_their_content() {
        let parsed = |text: &str| text.parse::<CpuTemplate>().unwrap();
        assert_eq!(parsed("none"), CpuTemplate::Host);
        assert_eq!(parsed("T2"), CpuTemplate::Named("T2".to_owned()));
        assert_eq!(parsed("t2.json"), CpuTemplate::File(PathBuf::from("t2.json")));
        let named = (Template::Static("T2".to_owned()), "template-T2".to_owned());
        assert_eq!(resolve(&parsed("T2")).unwrap(), named);

        let file = tempfile::NamedTempFile::new().unwrap();
        let template = CpuTemplate::File(file.path().to_owned());
        assert!(resolve(&template).is_err(), "an empty file is no template");
        std::fs::write(file.path(), "{\"cpuid_modifiers\": []}").unwrap();
        let (first, model) = resolve(&template).unwrap();
        assert_eq!(first, Template::Custom(serde_json::json!({"cpuid_modifiers": []})));
        assert!(model.starts_with("template-sha256-"), "{model}");
        std::fs::write(file.path(), "{\"cpuid_modifiers\": [], \"msr_modifiers\": []}").unwrap();
        assert_ne!(resolve(&template).unwrap().1, model);
    }
}
