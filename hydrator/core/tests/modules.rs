// SPDX-License-Identifier: Apache-2.0

//! What imports what.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// The modules of a crate and what each of them imports, by their paths.
#[derive(Default)]
struct Modules(BTreeMap<String, (String, BTreeSet<String>)>);

impl Modules {
    fn of(source: &Path) -> Self {
        let mut modules = Self::default();
        modules.read(source, "crate");
        let names: Vec<String> = modules.0.keys().cloned().collect();
        for (name, (text, imports)) in &mut modules.0 {
            for path in imported(text, name) {
                // What a path begins with may be a module; the longest is meant.
                let found = names
                    .iter()
                    .filter(|other| format!("{path}::").starts_with(&format!("{other}::")))
                    .max_by_key(|other| other.len());
                imports.extend(found.filter(|other| *other != name).cloned());
            }
        }
        modules
    }

    fn read(&mut self, folder: &Path, module: &str) {
        let entries = fs::read_dir(folder).expect("a folder of sources");
        for entry in entries {
            let path = entry.expect("an entry").path();
            let name = path.file_stem().and_then(|name| name.to_str());
            let name = name.expect("a name in ASCII");
            let inner = format!("{module}::{name}");
            if path.is_dir() {
                self.read(&path, &inner);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).expect("a source");
                let code = text.split("#[cfg(test)]\nmod").next().unwrap_or_default();
                let name = match name {
                    "lib" | "main" | "mod" => module,
                    _ => &inner,
                };
                self.0.entry(name.into()).or_default().0.push_str(code);
            }
        }
    }

    /// Modules that import each other in a circle, if there are any.
    fn circle(&self) -> Option<Vec<&str>> {
        // Take away what imports nothing that is left, until all is gone.
        let mut left: BTreeSet<&str> = self.0.keys().map(String::as_str).collect();
        loop {
            let mut free = left.iter().copied().filter(|name| {
                let imports = &self.0[*name].1;
                !imports.iter().any(|other| left.contains(other.as_str()))
            });
            match free.next() {
                Some(name) => left.remove(name),
                None => break,
            };
        }
        (!left.is_empty()).then(|| left.into_iter().collect())
    }
}

/// The paths that a module imports, from the root of its crate on.
fn imported(text: &str, module: &str) -> Vec<String> {
    let parent = module
        .rsplit_once("::")
        .map_or("crate", |(parent, _)| parent);
    let mut paths = Vec::new();
    for item in text.split(';') {
        let lines = item
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"));
        let item = lines.collect::<Vec<_>>().join(" ");
        let Some((_, path)) = item.split_once("use ") else {
            continue;
        };
        let (stem, names) = path.split_once('{').unwrap_or((path, ""));
        let stem = stem.trim().trim_end_matches("::");
        let stem = match stem.split_once("::").unwrap_or((stem, "")) {
            ("crate", rest) => format!("crate::{rest}"),
            ("super", rest) => format!("{parent}::{rest}"),
            ("self", rest) => format!("{module}::{rest}"),
            // A module of its own, or another crate, which is none of these.
            _ => format!("{module}::{stem}"),
        };
        let stem = stem.trim_end_matches(':');
        if names.is_empty() {
            paths.push(stem.into());
        } else {
            let names = names.trim_end_matches('}').split(',');
            paths.extend(names.map(|name| format!("{stem}::{}", name.trim())));
        }
    }
    paths
}

#[test]
fn no_modules_import_each_other_in_a_circle() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut circles = BTreeMap::new();
    for name in ["core", "daemon", "disks", "simulation"] {
        let modules = Modules::of(&workspace.join(name).join("src"));
        assert!(modules.0.len() > 1, "{name} has modules");
        if let Some(circle) = modules.circle() {
            circles.insert(name, circle.join(", "));
        }
    }
    assert!(circles.is_empty(), "{circles:#?}");
}

#[test]
fn a_circle_of_imports_is_found() {
    let module = |text: &str, imports: &[&str]| {
        let imports = imports.iter().map(ToString::to_string).collect();
        (text.to_string(), imports)
    };
    let mut modules = Modules::default();
    modules.0.insert("crate::low".into(), module("", &[]));
    modules.0.insert(
        "crate::one".into(),
        module("", &["crate::low", "crate::other"]),
    );
    modules
        .0
        .insert("crate::other".into(), module("", &["crate::one"]));
    assert_eq!(modules.circle(), Some(vec!["crate::one", "crate::other"]));
    modules.0.remove("crate::other");
    assert_eq!(modules.circle(), None);
    let paths = imported(
        "/// use x;\nuse crate::a::{b, C};\npub use super::d;",
        "crate::e::f",
    );
    assert_eq!(paths, ["crate::a::b", "crate::a::C", "crate::e::d"]);
}
