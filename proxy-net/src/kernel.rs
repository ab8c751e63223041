//! The kernel's release.

/// Reads major and minor number of a release; None if it starts with no number. A missing minor number is 0.
pub fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next().flatten().unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::version;

    #[test]
    fn releases_have_versions() {
        assert_eq!(version("5.10.0-46-cloud-amd64"), Some((5, 10)));
        assert_eq!(version("6.18.44+deb13"), Some((6, 18)));
        assert_eq!(version("7.0-rc1"), Some((7, 0)));
        assert_eq!(version("7"), Some((7, 0)));
        assert_eq!(version("mainline"), None);
    }
}
