use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use flate2::read::GzDecoder;
use tar::Archive;

use super::*;

const TIME: u64 = 1_700_000_000;

fn file(text: &str, executable: bool) -> Entry {
    Entry::File {
        content: text.into(),
        executable,
    }
}

fn files(entries: &[(&str, Entry)]) -> Files {
    let mut files = Files::default();
    entries
        .iter()
        .for_each(|(path, entry)| files.add(path, entry.clone()));
    files
}

fn oci(roots: &[(Arch, Files)]) -> Vec<u8> {
    image::oci(roots, "localhost/kpx", "1.2.3", TIME)
        .unwrap()
        .archive
}

#[test]
fn same_files_make_the_same_archive() {
    let one = ("bin/kpx", file("a program", true));
    let other = ("docs/a.md", file("text", false));
    let forth = files(&[one.clone(), other.clone()]).tar_gz(TIME).unwrap();
    let back = files(&[other, one.clone()]).tar_gz(TIME).unwrap();
    assert_eq!(forth, back);
    assert_ne!(forth, files(&[one]).tar_gz(TIME).unwrap());
}

#[test]
fn archive_holds_files_links_and_their_folders() {
    let files = files(&[
        ("bin/kpx", file("a program", true)),
        ("bin/kube-proxy", Entry::Link("kpx".into())),
        ("docs/more/a.md", file("text", false)),
    ]);
    let bytes = files.below("kpx-1").tar_gz(TIME).unwrap();
    let mut archive = Archive::new(GzDecoder::new(bytes.as_slice()));
    let entries = archive.entries().unwrap().map(|entry| {
        let entry = entry.unwrap();
        let header = entry.header();
        assert_eq!(
            (
                header.mtime().unwrap(),
                header.uid().unwrap(),
                header.gid().unwrap()
            ),
            (TIME, 0, 0)
        );
        format!(
            "{:o} {}",
            header.mode().unwrap(),
            entry.path().unwrap().display()
        )
    });
    let expected = [
        "755 kpx-1/",
        "755 kpx-1/bin/",
        "755 kpx-1/docs/",
        "755 kpx-1/docs/more/",
        "755 kpx-1/bin/kpx",
        "777 kpx-1/bin/kube-proxy",
        "644 kpx-1/docs/more/a.md",
    ];
    assert_eq!(entries.collect::<Vec<_>>(), expected);
}

#[test]
fn folder_is_taken_whole_with_executable_bits() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("a/b")).unwrap();
    fs::write(folder.path().join("a/b/run"), "#!").unwrap();
    fs::set_permissions(
        folder.path().join("a/b/run"),
        fs::Permissions::from_mode(0o700),
    )
    .unwrap();
    fs::write(folder.path().join("text"), "t").unwrap();
    let mut found = Files::default();
    found.add_folder(folder.path(), "deploy").unwrap();
    assert_eq!(
        found,
        files(&[
            ("deploy/a/b/run", file("#!", true)),
            ("deploy/text", file("t", false))
        ])
    );
}

#[test]
fn image_without_running_kpx_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image.tar");
    for root in [
        files(&[("bin/kpx", file("", true))]),
        files(&[("usr/local/bin/kpx", file("no program", true))]),
    ] {
        let arch = Arch::of_this_machine().unwrap();
        fs::write(&path, oci(&[(arch, root)])).unwrap();
        let error = format!("{:#}", image::try_out(&path, arch).unwrap_err());
        assert!(
            error.contains("kpx --version in the image") || error.contains("this needs root"),
            "{error}"
        );
    }
}

#[test]
fn image_names_its_content_by_digest() {
    let roots = [(
        Arch::Arm64,
        files(&[("usr/local/bin/kpx", file("a program", true))]),
    )];
    let bytes = oci(&roots);
    assert_eq!(bytes, oci(&roots));
    let folder = tempfile::tempdir().unwrap();
    Archive::new(bytes.as_slice())
        .unpack(folder.path())
        .unwrap();
    let read = |path: &str| fs::read(folder.path().join(path)).unwrap();
    let json = |path: &str| serde_json::from_slice::<serde_json::Value>(&read(path)).unwrap();
    let docker = json("manifest.json");
    assert_eq!(
        docker[0]["RepoTags"],
        serde_json::json!(["localhost/kpx:1.2.3"])
    );
    let config = json(docker[0]["Config"].as_str().unwrap());
    assert_eq!(config["created"], "2023-11-14T22:13:20Z");
    assert_eq!(config["architecture"], "arm64");
    let name = &json("index.json")["manifests"][0]["annotations"]["io.containerd.image.name"];
    assert_eq!(
        name, "localhost/kpx:1.2.3",
        "a name with its registry, which no stranger can take"
    );
    let layer = read(docker[0]["Layers"][0].as_str().unwrap());
    let mut tar = Vec::new();
    std::io::Read::read_to_end(&mut GzDecoder::new(layer.as_slice()), &mut tar).unwrap();
    assert_eq!(
        config["rootfs"]["diff_ids"][0],
        format!("sha256:{}", sums::sha256(&tar))
    );
    for blob in fs::read_dir(folder.path().join("blobs/sha256")).unwrap() {
        let blob = blob.unwrap();
        assert_eq!(
            blob.file_name().to_str().unwrap(),
            sums::sha256(&fs::read(blob.path()).unwrap())
        );
    }
}

#[test]
fn image_of_several_architectures_has_an_index_of_them() {
    let root = |text: &str| files(&[("usr/local/bin/kpx", file(text, true))]);
    let roots = [(Arch::Amd64, root("one")), (Arch::Arm64, root("other"))];
    let folder = tempfile::tempdir().unwrap();
    Archive::new(oci(&roots).as_slice())
        .unpack(folder.path())
        .unwrap();
    let json = |path: &str| {
        serde_json::from_slice::<serde_json::Value>(&fs::read(folder.path().join(path)).unwrap())
            .unwrap()
    };
    let blob = |descriptor: &serde_json::Value| {
        json(&format!(
            "blobs/{}",
            descriptor["digest"].as_str().unwrap().replace(':', "/")
        ))
    };
    let named = &json("index.json")["manifests"][0];
    assert_eq!(
        named["annotations"]["io.containerd.image.name"],
        "localhost/kpx:1.2.3"
    );
    let images = blob(named);
    let images = images["manifests"].as_array().unwrap();
    let arches: Vec<_> = images
        .iter()
        .map(|image| image["platform"]["architecture"].as_str().unwrap())
        .collect();
    assert_eq!(arches, ["amd64", "arm64"]);
    for image in images {
        assert_eq!(
            blob(&blob(image)["config"])["architecture"],
            image["platform"]["architecture"]
        );
    }
}

#[test]
fn second_name_of_kpx_is_packed_as_a_link() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("kpx"), "").unwrap();
    symlink("kpx", folder.path().join("kubectl-kpx")).unwrap();
    let mut found = Files::default();
    found.add_folder(folder.path(), "bin").unwrap();
    assert_eq!(
        found,
        files(&[
            ("bin/kpx", file("", false)),
            ("bin/kubectl-kpx", Entry::Link("kpx".into()))
        ])
    );
}

#[test]
fn checksums_detect_a_changed_file() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("b"), "bb").unwrap();
    fs::write(folder.path().join("a"), "").unwrap();
    sums::write(folder.path(), &["b".into(), "a".into()]).unwrap();
    let text = fs::read_to_string(folder.path().join("SHA256SUMS")).unwrap();
    assert!(
        text.starts_with("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855  a\n"),
        "{text}"
    );
    assert_eq!(
        sums::verify(folder.path()).unwrap(),
        [("a".to_owned(), 0), ("b".to_owned(), 2)]
    );
    fs::write(folder.path().join("b"), "bc").unwrap();
    assert_eq!(
        sums::verify(folder.path()).unwrap_err().to_string(),
        "b is not what SHA256SUMS says"
    );
}

#[test]
fn dynamic_program_has_an_interpreter() {
    let own = fs::read(std::env::current_exe().unwrap()).unwrap();
    assert!(has_interpreter(&own), "this test is linked dynamically");
    assert!(!has_interpreter(b"#!/bin/sh"));
}

/// Returns the packaged files as pairs: source below the workspace, path in the package. Staged
/// files, which `dist` creates first, have the source from cargo-deb's list.
fn packaged() -> (Vec<(String, String)>, serde_json::Value) {
    let metadata = metadata(Arch::of_this_machine().unwrap()).unwrap();
    let package = metadata["packages"]
        .as_array()
        .unwrap()
        .iter()
        .find(|one| one["name"] == "proxy-agent")
        .unwrap();
    let deb = package["metadata"]["deb"].clone();
    let mut files = Vec::new();
    for asset in deb["assets"].as_array().unwrap() {
        let source = asset[0].as_str().unwrap();
        let place = asset[1].as_str().unwrap();
        let source = source
            .strip_prefix("../")
            .expect("a path from the workspace");
        // `dist` copies the tree's files before.
        let copied = source.strip_prefix("target/dist/stage/").filter(|source| {
            ["deploy/", "docs/"]
                .iter()
                .any(|one| source.starts_with(one))
                || source.ends_with(".md")
        });
        let source = copied.unwrap_or(source);
        let (folder, pattern) = source.rsplit_once('/').unwrap_or(("", source));
        let (folder, pattern) = folder
            .strip_suffix("/**")
            .map_or((folder, pattern), |folder| (folder, "**"));
        if folder.starts_with("target/dist/stage") || !pattern.contains('*') {
            files.push((source.to_owned(), place.to_owned()));
            continue;
        }
        let mut below = Files::default();
        below
            .add_folder(&workspace::root().join(folder), "")
            .unwrap();
        let is_meant = |path: &&str| pattern == "**" || (!path.contains('/') && pattern == "*");
        let before = files.len();
        files.extend(
            below
                .paths()
                .filter(is_meant)
                .map(|path| (format!("{folder}/{path}"), format!("{place}{path}"))),
        );
        assert!(files.len() > before, "{source} matches no file");
    }
    (files, deb)
}

#[test]
fn debian_package_names_files_that_are_there() {
    let (files, deb) = packaged();
    for (source, _) in files
        .iter()
        .filter(|(source, _)| !source.starts_with("target/dist/stage/"))
    {
        assert!(workspace::root().join(source).is_file(), "no file {source}");
    }
    let has = |place: &str| files.iter().any(|(_, one)| format!("/{one}") == place);
    for file in deb["conf-files"].as_array().unwrap() {
        assert!(
            has(file.as_str().unwrap()),
            "{file} is a configuration file, and not packaged"
        );
    }
    let unit = fs::read_to_string(workspace::root().join("deploy/systemd/kpx.service")).unwrap();
    for named in ["/usr/bin/kpx", "/etc/kpx/config.yaml", "/etc/kpx/kpx.env"] {
        assert!(
            unit.contains(named) && has(named),
            "{named} is in the unit and in the package"
        );
    }
    let scripts = workspace::root().join(
        deb["maintainer-scripts"]
            .as_str()
            .unwrap()
            .trim_start_matches("../"),
    );
    assert!(scripts.join("prerm").is_file(), "{}", scripts.display());
}

/// Pages of docs/ link to each other, to pictures and to manifests.
#[test]
fn links_of_packaged_pages_lead_to_packaged_files() {
    let (files, _) = packaged();
    let sources: std::collections::BTreeSet<_> =
        files.iter().map(|(source, _)| source.as_str()).collect();
    let mut links = 0;
    for page in sources.iter().filter(|source| source.ends_with(".md")) {
        let text = fs::read_to_string(workspace::root().join(page)).unwrap();
        for link in text
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split([')', '#']).next())
        {
            if link.is_empty() || link.contains("://") {
                continue;
            }
            let mut path = Path::new(page).parent().unwrap().to_path_buf();
            for part in link.split('/') {
                if part == ".." {
                    path.pop();
                } else {
                    path.push(part);
                }
            }
            let target = path.to_string_lossy();
            let is_for_users = target.starts_with("docs/") || target.starts_with("deploy/");
            assert!(
                !is_for_users || sources.contains(target.as_ref()),
                "{page} leads to {target}, which is not packaged"
            );
            links += usize::from(is_for_users);
        }
    }
    assert!(links > 100, "{links} links");
}

#[test]
fn package_of_another_architecture_or_kpx_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("root");
    let stage = folder.path().join("stage");
    let put = |path: &str, content: &str| {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    };
    put(
        "DEBIAN/control",
        "Package: kpx\nVersion: 1.2.3-1\nArchitecture: arm64\nMaintainer: k <k@k>\nDescription: k\n",
    );
    for path in [
        "etc/kpx/config.yaml",
        "etc/kpx/kpx.env",
        "usr/share/bash-completion/completions/kpx",
    ] {
        put(path, "");
    }
    put("usr/bin/kpx", "a program");
    put(
        "lib/systemd/system/kpx.service",
        &fs::read_to_string(workspace::root().join("deploy/systemd/kpx.service")).unwrap(),
    );
    symlink("kpx", root.join("usr/bin/kubectl-kpx")).unwrap();
    fs::create_dir_all(stage.join("bin")).unwrap();
    fs::write(stage.join("bin/kpx"), "a program").unwrap();
    let package = folder.path().join("kpx.deb");
    let look = |arch| {
        let mut build = std::process::Command::new("dpkg-deb");
        build
            .args(["--root-owner-group", "--build"])
            .arg(&root)
            .arg(&package)
            .stdout(std::process::Stdio::null());
        shell::run(build).unwrap();
        deb::look_into(&package, arch, "1.2.3", &stage).map_err(|error| error.to_string())
    };
    assert_eq!(look(Arch::Arm64), Ok(()));
    assert!(
        look(Arch::Amd64)
            .unwrap_err()
            .contains("is for arm64 instead of amd64")
    );
    fs::write(root.join("usr/bin/kpx"), "another program").unwrap();
    assert!(look(Arch::Arm64).unwrap_err().contains("holds another kpx"));
}

#[test]
fn licenses_of_linked_crates_are_listed_with_their_texts() {
    let metadata = metadata(Arch::of_this_machine().unwrap()).unwrap();
    let component = |name: &str| {
        let packages = metadata["packages"].as_array().unwrap();
        let package = packages.iter().find(|one| one["name"] == name).unwrap();
        serde_json::json!({ "name": name, "version": package["version"] })
    };
    let names = [
        "proxy-core",
        "tokio",
        "aya",
        "aya-ebpf",
        "crc-catalog",
        "kube-core",
    ];
    let bill = serde_json::json!({ "components": names.map(component) });
    let text = licenses::texts(&bill, &metadata).unwrap();
    let (list, texts) = text.split_once("\n==== [1]").unwrap();
    let of_crate = |name| list.lines().find(|line| line.starts_with(name));
    for linked in ["tokio ", "aya "] {
        let line = of_crate(linked).unwrap_or_else(|| panic!("{linked} is linked"));
        let mark = line.rsplit(' ').next().unwrap();
        assert!(
            mark == "[1]" || texts.contains(&format!("==== {mark}")),
            "{line}"
        );
    }
    let in_folder = of_crate("crc-catalog ").unwrap();
    assert!(in_folder.ends_with(']'), "its texts are in a folder");
    for name in ["kube-core ", "aya-ebpf "] {
        let without = of_crate(name).unwrap();
        assert!(without.ends_with(licenses::NO_TEXT), "{without}");
    }
    assert!(
        texts.contains("Permission is hereby granted, free of charge"),
        "the text of the MIT license"
    );
    assert!(
        of_crate("proxy-core ").is_none() && of_crate("serde ").is_none(),
        "neither kpx itself nor what the bill lacks"
    );
}
