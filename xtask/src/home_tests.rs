use serde_json::json;

use super::*;
use crate::dist::pack::Files;
use crate::shell;

const DIGEST: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

fn decided() -> Home {
    Home {
        repository: "https://forge.invalid/kpx".to_owned(),
        downloads: "https://forge.invalid/kpx/v{version}".to_owned(),
        site: "https://pages.invalid/kpx".to_owned(),
        image: "registry.invalid/kpx".to_owned(),
        chart: "registry.invalid/charts".to_owned(),
        security: "mailto:kpx@lists.invalid".to_owned(),
        key: "release.pub".to_owned(),
    }
}

#[test]
fn undecided_fields_have_names() {
    assert_eq!(decided().undecided(), [""; 0]);
    let home = Home {
        image: String::new(),
        key: String::new(),
        ..decided()
    };
    assert_eq!(home.undecided(), ["image", "key"]);
    assert_eq!(
        home.on_trial(5000).undecided(),
        [""; 0],
        "a trial needs no decision"
    );
}

#[test]
fn a_trial_stays_on_its_registry() {
    let home = decided().on_trial(5000);
    assert_eq!(
        (home.image.as_str(), home.chart.as_str()),
        ("127.0.0.1:5000/kpx", "localhost:5000/charts")
    );
    assert_eq!(home.site, decided().site);
}

#[test]
fn a_misspelt_field_is_named() {
    let mut table = json!({ "repository": "", "downloads": "", "site": "", "image": "", "chart": "", "security": "", "key": "" });
    assert_eq!(Home::parse(&table).unwrap(), Home::default());
    table["registry"] = json!("");
    let error = Home::parse(&table).unwrap_err().to_string();
    assert!(error.contains("\"registry\""), "{error}");
    let error = Home::parse(&json!({ "repository": "a b" })).unwrap_err();
    assert!(error.to_string().contains("repository"), "{error}");
}

#[test]
fn page_of_a_release_has_its_addresses() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join(PAGE);
    fs::create_dir_all(page.parent().unwrap()).unwrap();
    let copy = || fs::copy(workspace::root().join(PAGE), &page).unwrap();
    copy();
    let before = fs::read_to_string(&page).unwrap();
    Home::default()
        .complete_page(folder.path(), "1.2.3")
        .unwrap();
    assert_eq!(fs::read_to_string(&page).unwrap(), before);

    decided().complete_page(folder.path(), "1.2.3").unwrap();
    let text = fs::read_to_string(&page).unwrap();
    for address in [
        "registry.invalid/kpx:",
        "oci://registry.invalid/charts/kpx",
        "https://forge.invalid/kpx/v1.2.3/kpx.yaml",
    ] {
        assert!(text.contains(address), "{address}: {text}");
    }
    for word in [
        "IMAGE",
        "CHARTS",
        "DOWNLOADS",
        "not published",
        "No version is published",
    ] {
        assert!(!text.contains(word), "{word}: {text}");
    }
}

#[test]
fn released_manifests_name_the_released_image_and_pages() {
    let version = env!("CARGO_PKG_VERSION");
    let folder = tempfile::tempdir().unwrap();
    let mut files = Files::default();
    for part in ["helm", "kubeadm", "kubernetes", "monitoring"] {
        files
            .add_folder(&workspace::root().join("deploy").join(part), part)
            .unwrap();
    }
    files.write(folder.path()).unwrap();
    decided().publish(folder.path(), version, DIGEST).unwrap();
    let read = |path: &str| fs::read_to_string(folder.path().join(path)).unwrap();
    let has = |path: &str, text: &str| {
        let found = read(path);
        assert!(found.contains(text), "{path} lacks {text}:\n{found}");
    };
    let image = format!("registry.invalid/kpx:{version}@{DIGEST}");
    has(
        "kubeadm/kubeproxydaemonset.yaml",
        &format!("image: {image} "),
    );
    let component = "kubernetes/components/image/kustomization.yaml";
    has(component, "    newName: registry.invalid/kpx\n");
    has(component, &format!("    digest: {DIGEST}\n"));
    has(
        "helm/kpx/values.yaml",
        "  repository: registry.invalid/kpx\n",
    );
    has("helm/kpx/values.yaml", &format!("  digest: {DIGEST}\n"));
    has(
        "helm/values/kind.yaml",
        "  repository: registry.invalid/kpx\n",
    );
    has("helm/kpx/Chart.yaml", &format!("      image: {image}\n"));
    has(
        "helm/kpx/README.md",
        &format!("oci://registry.invalid/charts/kpx --version {version} "),
    );
    let page = format!("https://pages.invalid/kpx/{version}/docs");
    has(
        "helm/kpx/README.md",
        &format!("({page}/install.html#the-image)"),
    );
    for rules in [
        "monitoring/alerts.yaml",
        "monitoring/prometheus-rule.yaml",
        "helm/kpx/files/alerts.yaml",
    ] {
        has(rules, &format!("runbook_url: {page}/alerts.html#kpxdown\n"));
        assert!(!read(rules).contains("runbook_url: docs"), "{rules}");
    }
}

#[test]
fn a_forgotten_image_of_a_checkout_is_found() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("pod.yaml"), "image: 'localhost/kpx'").unwrap();
    let error = decided().publish(folder.path(), "1.2.3", DIGEST);
    assert!(
        error.unwrap_err().to_string().contains("pod.yaml"),
        "the file is named"
    );
}

#[test]
fn documented_command_leads_alerts_to_a_copy_of_their_page() {
    let page = fs::read_to_string(workspace::root().join("docs/alerts.md")).unwrap();
    let (_, command) = page.split_once("`sed -i ").expect("the command");
    let (command, _) = command.split_once(" alerts.yaml`").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut files = Files::default();
    files
        .add_folder(&workspace::root().join("deploy/monitoring"), "released")
        .unwrap();
    files.write(folder.path()).unwrap();
    let (released, tree) = (folder.path().join("released"), workspace::root());
    decided()
        .publish(&released, env!("CARGO_PKG_VERSION"), DIGEST)
        .unwrap();
    for rules in [released, tree.join("deploy/monitoring")] {
        let file = rules.join("alerts.yaml");
        let text = shell::output("sh", &["-c", &format!("sed {command} {}", file.display())]);
        let text = text.unwrap();
        let links: Vec<_> = text
            .lines()
            .filter_map(|line| line.trim().strip_prefix("runbook_url: "))
            .collect();
        assert!(links.len() > 10, "{links:?}");
        for link in links {
            assert!(
                link.starts_with("https://wiki.corp.test/kpx/alerts.md#kpx"),
                "{link} in {}",
                file.display()
            );
        }
    }
}
