//! Builds the kernel programs, then kpx, which contains them.

use std::env::consts::ARCH;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::SystemTime;

use anyhow::{Context, Result, ensure};

use crate::arch::Arch;
use crate::setup::{self, Compiler, Need, Toolchain};
use crate::step::step;
use crate::{shell, verify, workspace};

const TARGET: &str = "bpfel-unknown-none";
/// The object of the kernel programs in the target directory, where build scripts look for it.
const OBJECT: &str = "kpx.bpf.o";

#[derive(clap::Args, Default)]
pub(crate) struct Options {
    /// Build kpx optimised; the kernel programs always are
    #[arg(long)]
    pub(crate) release: bool,
    /// Log single packets, from the kernel programs as well
    #[arg(long)]
    pub(crate) log: bool,
    /// Link kpx statically, for images and packages
    #[arg(long = "static")]
    pub(crate) static_: bool,
    /// Build for this architecture; another one than this machine's takes a compiler and QEMU
    #[arg(long, value_enum)]
    pub(crate) arch: Option<Arch>,
    /// Print for each kernel program what it costs to verify and load, and fail if that is too
    /// much; needs root
    #[arg(long)]
    pub(crate) verbose: bool,
}

impl Options {
    /// The cargo feature for the kernel programs, if any.
    fn feature(&self) -> Option<&'static str> {
        self.log.then_some("log")
    }

    fn other_arch(&self) -> Option<Arch> {
        self.arch.filter(|arch| !arch.is_native())
    }
}

/// Builds, and returns the path of kpx.
pub(crate) fn run(options: &Options) -> Result<PathBuf> {
    with(&setup::ensure(Need::Build)?, options)
}

/// Builds with an installed toolchain.
pub(crate) fn with(toolchain: &Toolchain, options: &Options) -> Result<PathBuf> {
    let other = options.other_arch();
    let other = other
        .map(|arch| Ok::<_, anyhow::Error>((arch, object_for(toolchain, options, arch)?)))
        .transpose()?;
    if other.is_none() {
        object(toolchain, options)?;
    }
    if options.verbose {
        step("verify the kernel programs", || {
            verify::run(&workspace::target_dir()?.join(OBJECT))
        })?;
    }
    step("build kpx", || {
        let mut cargo = workspace::cargo();
        cargo.args([
            if options.static_ { "rustc" } else { "build" },
            "--package",
            "proxy-agent",
            "--bin",
            "kpx",
        ]);
        cargo.args(options.release.then_some("--release"));
        cargo.args(options.log.then_some("--features=log"));
        if let Some((arch, object)) = &other {
            arch.choose(&mut cargo, object);
        }
        // Only the last step gets these flags, so that a plain build shares the earlier steps. The
        // release profile strips by itself; a debug build is to be packed as quickly.
        cargo.args(
            options
                .static_
                .then_some(["--", "-Ctarget-feature=+crt-static", "-Cstrip=symbols"])
                .iter()
                .flatten(),
        );
        shell::run(cargo)
    })?;
    match other {
        Some((arch, _)) => {
            let profile = if options.release { "release" } else { "debug" };
            Ok(workspace::target_dir()?
                .join(arch.triple())
                .join(profile)
                .join("kpx"))
        }
        None => workspace::kpx(options.release),
    }
}

/// Builds the kernel programs for a kpx of another architecture. Returns their object.
pub(crate) fn object_for(toolchain: &Toolchain, options: &Options, arch: Arch) -> Result<PathBuf> {
    arch.ensure_tools()?;
    let target_dir = workspace::target_dir()?;
    let name = arch.name();
    let object = target_dir.join(format!("kpx-{}.bpf.o", arch.name()));
    step(&format!("build the kernel programs for {name}"), || {
        let bpf_dir = target_dir.join(format!("bpf-{name}"));
        shell::run(kernel_programs(
            toolchain,
            options.feature(),
            &bpf_dir,
            name,
        ))?;
        install(&bpf_dir.join(TARGET).join("release/kpx"), &object)
    })?;
    Ok(object)
}

/// Builds kpx and the demo in one cargo call, so that cargo unifies features and builds each crate
/// once. The first build takes minutes, so it has neither debug information nor optimised tools.
pub(crate) fn with_demo() -> Result<PathBuf> {
    let mut cargo = workspace::cargo();
    cargo.args([
        "build",
        "--config=profile.dev.debug=false",
        "--config=profile.dev.package.tools.opt-level=0",
        "--package",
        "proxy-agent",
        "--bin",
        "kpx",
        "--package",
        "tools",
        "--bin",
        "kpx-demo",
    ]);
    around("build kpx and its demo", cargo, || {
        object(&setup::ensure(Need::Lab)?, &Options::default())
    })?;
    workspace::kpx(false)
}

/// Returns a cargo command for all crates that run on this machine. All calls select these crates,
/// so that features agree and cargo builds each crate once.
pub(crate) fn workspace_cargo(command: &str) -> Command {
    let mut cargo = workspace::cargo();
    cargo.args([command, "--workspace", "--exclude", "proxy-ebpf"]);
    cargo
}

/// Builds the kernel programs, kpx, its tools and all tests in parallel.
pub(crate) fn everything() -> Result<PathBuf> {
    let mut cargo = workspace_cargo("build");
    cargo.arg("--all-targets");
    around("build kpx, its tools and all tests", cargo, || {
        object(&setup::ensure(Need::Tests)?, &Options::default())
    })?;
    workspace::kpx(false)
}

/// Builds the kernel programs, then runs cargo. Does both in parallel if the target directory has
/// no object yet.
///
/// The build script waits for the lock on the missing object, while cargo builds the other crates.
/// With an old object, cargo would consider itself up to date before the new object exists.
fn around(
    name: &str,
    mut cargo: Command,
    kernel_programs: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let object = workspace::target_dir()?.join(OBJECT);
    if object.metadata().is_ok_and(|object| object.len() > 0) {
        kernel_programs()?;
        return step(name, || shell::run(cargo));
    }
    let lock = lock_missing(&object)?;
    // A waiting build script occupies one of cargo's jobs.
    let jobs = thread::available_parallelism()
        .context("count the processors")?
        .get()
        + 1;
    cargo.args(["--quiet", "--jobs", &jobs.to_string()]);
    let started = SystemTime::now();
    step(name, || {
        let mut child = cargo
            .spawn()
            .with_context(|| format!("run `{}`", shell::show(&cargo)))?;
        // cargo treats a file that is newer than the start of the build script as changed, and
        // would build twice.
        let built = kernel_programs().and_then(|()| date(&object, started));
        if built.is_err() {
            child.kill().context("stop cargo")?;
        }
        drop(lock);
        let status = child.wait().context("wait for cargo")?;
        built?;
        ensure!(
            status.success(),
            "`{}` failed ({status})",
            shell::show(&cargo)
        );
        Ok(())
    })
}

fn date(object: &Path, time: SystemTime) -> Result<()> {
    let file = File::options()
        .write(true)
        .open(object)
        .with_context(|| format!("open {}", object.display()))?;
    file.set_modified(time)
        .with_context(|| format!("date {}", object.display()))
}

/// Removes an empty stand-in of the object, and takes the lock that build scripts wait for.
fn lock_missing(object: &Path) -> Result<File> {
    let path = object.with_added_extension("lock");
    let lock = File::create(&path).with_context(|| format!("create {}", path.display()))?;
    lock.lock()
        .with_context(|| format!("lock {}", path.display()))?;
    match fs::remove_file(object) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", object.display()))
        }
        _ => Ok(lock),
    }
}

/// Builds equivalent kernel programs with other instructions: the variant with logging.
pub(crate) fn other_object(toolchain: &Toolchain) -> Result<PathBuf> {
    let options = Options {
        log: true,
        ..Options::default()
    };
    let object = workspace::target_dir()?.join("kpx-log.bpf.o");
    build_object(
        "build kernel programs that log",
        toolchain,
        &options,
        "bpf-log",
        &object,
    )?;
    Ok(object)
}

/// Builds only the kernel programs, and installs them for proxy-datapath's build script.
pub(crate) fn object(toolchain: &Toolchain, options: &Options) -> Result<()> {
    let object = workspace::target_dir()?.join(OBJECT);
    build_object(
        "build the kernel programs",
        toolchain,
        options,
        "bpf",
        &object,
    )
}

/// Builds kernel programs in a directory of the target directory, and installs them as `object`.
fn build_object(
    name: &str,
    toolchain: &Toolchain,
    options: &Options,
    folder: &str,
    object: &Path,
) -> Result<()> {
    step(name, || {
        let bpf_dir = workspace::target_dir()?.join(folder);
        shell::run(kernel_programs(
            toolchain,
            options.feature(),
            &bpf_dir,
            ARCH,
        ))?;
        let built = bpf_dir.join(TARGET).join("release/kpx");
        verify::is_fit_for_old_kernels(&built)?;
        install(&built, object)
    })
}

/// Returns the command with the toolchain's own cargo. Cargo.lock is up to date: the workspace's
/// cargo has just run.
fn kernel_programs(
    toolchain: &Toolchain,
    feature: Option<&str>,
    target_dir: &Path,
    arch: &str,
) -> Command {
    let mut cargo = match toolchain.compiler {
        Compiler::Debian => {
            let mut cargo = Command::new("/usr/bin/cargo");
            // aya-ebpf needs unstable features of the compiler.
            cargo
                .args(["build"])
                .env("RUSTC", "/usr/bin/rustc")
                .env("RUSTC_BOOTSTRAP", "1");
            cargo
        }
        Compiler::Nightly => {
            let mut cargo = Command::new("rustup");
            cargo
                .args(["run", "nightly", "cargo", "build", "-Zbuild-std=core"])
                .env_remove("RUSTC");
            cargo
        }
    };
    // Variables for the compiler of xtask must not reach this compiler.
    for name in [
        "RUSTUP_TOOLCHAIN",
        "CARGO",
        "RUSTC_WRAPPER",
        "RUSTC_WORKSPACE_WRAPPER",
        "LD_LIBRARY_PATH",
    ] {
        cargo.env_remove(name);
    }
    workspace::forget_xtask(&mut cargo);
    cargo.current_dir(workspace::root()).env(
        "CARGO_ENCODED_RUSTFLAGS",
        rustflags(&toolchain.linker, arch),
    );
    cargo.args([
        "--locked",
        "--package",
        "proxy-ebpf",
        "--release",
        "--target",
        TARGET,
        "--target-dir",
    ]);
    cargo
        .arg(target_dir)
        .args(feature.map(|feature| format!("--features={feature}")));
    cargo
}

/// Returns the compiler flags in the encoding that cargo prefers to every other source of flags.
fn rustflags(linker: &Path, arch: &str) -> String {
    [
        &format!("-Clinker={}", linker.display()),
        "-Clink-arg=--btf",
        // For larger sizes LLVM calls a byte loop, which costs time per packet and in the verifier.
        "-Clink-arg=--llvm-args=--max-store-memset=64",
        "-Clink-arg=--llvm-args=--max-store-memmove=64",
        "-Cdebuginfo=2", // BTF is made from it.
        // BTF names source files, and kpx contains it: two folders make the same kpx.
        &format!("--remap-path-prefix={}=", workspace::root().display()),
        "-Ctarget-cpu=v3",
        &format!("--cfg=bpf_target_arch=\"{arch}\""),
    ]
    .join("\u{1f}")
}

/// Copies the object to where proxy-datapath's build script looks for it. An equal object stays,
/// because a new file would rebuild kpx.
fn install(from: &Path, to: &Path) -> Result<()> {
    let object = fs::read(from).with_context(|| format!("read {}", from.display()))?;
    let same = match fs::read(to) {
        Ok(old) => old == object,
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        Err(error) => return Err(error).with_context(|| format!("read {}", to.display())),
    };
    if !same {
        fs::write(to, object).with_context(|| format!("write {}", to.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(compiler: Compiler, options: &Options) -> String {
        let toolchain = Toolchain {
            compiler,
            linker: "/opt/bpf-linker".into(),
        };
        shell::show(&kernel_programs(
            &toolchain,
            options.feature(),
            Path::new("target/bpf"),
            "aarch64",
        ))
    }

    #[test]
    fn each_compiler_has_its_command() {
        let debian = command(Compiler::Debian, &Options::default());
        assert!(
            debian.contains("RUSTC=/usr/bin/rustc RUSTC_BOOTSTRAP=1 /usr/bin/cargo build --locked"),
            "{debian}"
        );
        let nightly = command(
            Compiler::Nightly,
            &Options {
                log: true,
                release: true,
                ..Default::default()
            },
        );
        assert!(
            nightly.contains(" rustup run nightly cargo build -Zbuild-std=core --locked"),
            "{nightly}"
        );
        assert!(
            nightly.ends_with("--target bpfel-unknown-none --target-dir target/bpf --features=log"),
            "{nightly}"
        );
        for command in [debian, nightly] {
            assert!(
                command.contains("--cfg=bpf_target_arch=\"aarch64\""),
                "{command}"
            );
            let remapped = format!("--remap-path-prefix={}=", workspace::root().display());
            assert!(command.contains(&remapped), "{command}");
            assert!(
                command
                    .contains("-Clinker=/opt/bpf-linker -Clink-arg=--btf -Clink-arg=--llvm-args="),
                "{command}"
            );
        }
    }

    #[test]
    fn equal_object_is_left_alone() {
        let dir = std::env::temp_dir().join(format!("kpx-install-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let from = dir.join("from");
        let to = dir.join("to");
        let modified = |file: &Path| fs::metadata(file).unwrap().modified().unwrap();
        fs::write(&from, "one").unwrap();
        install(&from, &to).unwrap();
        let written = std::time::UNIX_EPOCH;
        fs::File::options()
            .write(true)
            .open(&to)
            .unwrap()
            .set_modified(written)
            .unwrap();
        install(&from, &to).unwrap();
        assert_eq!(modified(&to), written);
        fs::write(&from, "two").unwrap();
        install(&from, &to).unwrap();
        assert_eq!(fs::read(&to).unwrap(), b"two");
        assert_ne!(modified(&to), written);
        fs::remove_dir_all(&dir).unwrap();
    }
}
