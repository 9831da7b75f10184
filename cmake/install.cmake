# What `cmake --install` puts where: the library, its headers, the package that find_package(qmlp)
# reads, and the licence. The program installs itself (cli/CMakeLists.txt).
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/qmlp)

install(TARGETS qmlp EXPORT qmlpTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
                                        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(QMLP_BUILD_C)
  install(TARGETS qmlp_c EXPORT qmlpTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
install(DIRECTORY include/qmlp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(EXPORT qmlpTargets NAMESPACE qmlp:: DESTINATION ${package_dir})

configure_package_config_file(cmake/qmlpConfig.cmake.in ${PROJECT_BINARY_DIR}/qmlpConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
# Before 1.0 a minor version may break its users.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/qmlpConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/qmlpConfig.cmake ${PROJECT_BINARY_DIR}/qmlpConfigVersion.cmake
              cmake/FindPCRE2.cmake DESTINATION ${package_dir})
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

# For builds without CMake. The prefix is found from the file's own place, so a package may be moved.
file(RELATIVE_PATH pc_to_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
set(pkgconfig_modules qmlp)
if(QMLP_BUILD_C)
  list(APPEND pkgconfig_modules qmlp_c)
endif()
foreach(module ${pkgconfig_modules})
  configure_file(cmake/${module}.pc.in ${PROJECT_BINARY_DIR}/${module}.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/${module}.pc
          DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endforeach()
